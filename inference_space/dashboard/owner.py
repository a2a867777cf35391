"""The owner's tab: pause following, pin a version, heal. Visitors can do nothing with it."""

from __future__ import annotations

from collections.abc import Callable

import gradio as gr
from markupsafe import Markup

from delta_weight_sync.store import BucketError
from inference_space.dashboard.controls import Controls, Owner
from inference_space.dashboard.login import hindrance
from inference_space.dashboard.templates import render_template

_REFUSED = (
    "Only the owner may do this: give the replica's key (its setting REPLICA_KEY), or log in as its owner."
)
_NO_VERSION = "Give the version to pin: a whole number from 0 on."
_ACTIONS = {
    "Pause following": "it keeps the version that it serves, whatever is published.",
    "Follow the newest": "ends a pause and a pin.",
    "Heal": "it compares all live weights with the published ones and writes what differs.",
    "Pin this version": "it goes there and stays, to an older one as well; vLLM goes on answering.",
}


def build(controls: Controls, owner: Owner) -> None:
    """Add the tab's components to the Blocks that are being built."""
    gr.HTML("<h1>This replica</h1>", apply_default_css=False)
    said = gr.HTML(lambda: describe(controls), elem_id="dws-owner-said", apply_default_css=False)
    if owner.name:
        gr.LoginButton(size="md", icon=None)
    else:
        gr.HTML(Markup('<p class="mute">{}</p>').format(hindrance()), apply_default_css=False)
    key = gr.Textbox(label="Key", type="password", visible=bool(owner.key), elem_id="dws-key")
    with gr.Row():
        pause, resume, heal = (gr.Button(name) for name in list(_ACTIONS)[:3])
    with gr.Row():
        version = gr.Number(label="Version", precision=0)
        pin = gr.Button(list(_ACTIONS)[3])
    answer = gr.HTML("", elem_id="dws-owner-answer", apply_default_css=False)
    gr.HTML(render_template("actions.html", actions=_ACTIONS), apply_default_css=False)
    for button, act in (
        (pause, lambda _: controls.pause()),
        (resume, lambda _: controls.resume()),
        (heal, lambda _: controls.heal()),
        (pin, lambda number: _pin(controls, number)),
    ):
        run = guarded(controls, owner, act)
        outputs = [said, answer]
        button.click(run, [key, version], outputs, show_progress="hidden", api_visibility="private")


def describe(controls: Controls) -> str:
    """What the replica follows, in words."""
    if controls.pinned:
        return Markup("<p>It stays at <b>v{}</b>.</p>").format(controls.pinned.version)
    if controls.paused:
        return "<p>It is <b>paused</b>: it stays where it is.</p>"
    return "<p>It follows the newest version.</p>"


def _pin(controls: Controls, version: int | None) -> None:
    if version is None or version < 0:
        raise ValueError(_NO_VERSION)
    controls.pin(version)


def guarded(
    controls: Controls, owner: Owner, act: Callable[[int | None], None]
) -> Callable[[str | None, int | None, gr.OAuthProfile | None], tuple[str, str]]:
    """`act` for the owner only; it answers what the replica follows, and why nothing was done."""

    # Gradio fills in the profile, which only its signed session can hold; nobody can send one.
    def run(key: str | None, version: int | None, profile: gr.OAuthProfile | None) -> tuple[str, str]:
        refused = ""
        try:
            if not owner.allows(key or "", profile.username if profile else ""):
                raise ValueError(_REFUSED)
            act(version)
        except (ValueError, BucketError) as error:
            refused = Markup('<p class="alert" role="alert">{}</p>').format(error)
        return describe(controls), refused

    return run
