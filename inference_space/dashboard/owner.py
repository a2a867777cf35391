"""The owner's tab: pause following, pin a version, force a re-join. Visitors can do nothing with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from html import escape

import gradio as gr

from inference_space.dashboard.controls import Controls, Owner

_REFUSED = (
    "Only the owner may do this: give the replica's key (its setting REPLICA_KEY), or log in as its owner."
)


def build(controls: Controls, owner: Owner) -> None:
    """Add the tab's components to the Blocks that are being built."""
    gr.HTML("<h1>This replica</h1>", apply_default_css=False)
    said = gr.HTML(lambda: describe(controls), elem_id="dws-owner-said", apply_default_css=False)
    if login := bool(os.environ.get("OAUTH_CLIENT_ID") and owner.name):
        gr.LoginButton()
    key = gr.Textbox(label="Key", type="password", visible=bool(owner.key), elem_id="dws-key")
    with gr.Row():
        pause, resume, rejoin = (
            gr.Button(name) for name in ("Pause following", "Follow the newest", "Re-join")
        )
    with gr.Row():
        version = gr.Number(label="Version", precision=0, minimum=0, value=0)
        pin = gr.Button("Pin this version")
    for button, act in (
        (pause, lambda _: controls.pause()),
        (resume, lambda _: controls.resume()),
        (rejoin, lambda _: controls.rejoin()),
        (pin, lambda number: controls.pin(int(number))),
    ):
        run = _guarded(controls, owner, act, login)
        button.click(run, [key, version], said, queue=False, show_progress="hidden", api_visibility="private")


def describe(controls: Controls) -> str:
    """What the replica follows, in words."""
    now = controls.following()
    if now.pinned is not None:
        return f"<p>It stays at <b>v{now.pinned}</b>.</p>"
    if now.paused:
        return "<p>It is <b>paused</b>: it stays where it is.</p>"
    return "<p>It follows the newest version.</p>"


def _guarded(
    controls: Controls, owner: Owner, act: Callable[[int], None], login: bool
) -> Callable[[str, int, gr.Request], str]:
    def run(key: str, version: int, request: gr.Request) -> str:
        session = request.request.session if login and request.request else {}
        name = session.get("oauth_info", {}).get("userinfo", {}).get("preferred_username", "")
        if not owner.allows(key or "", name):
            return f'<p class="alert" role="alert">{_REFUSED}</p>'
        try:
            act(version or 0)
        except ValueError as error:
            return f'<p class="alert" role="alert">{escape(str(error))}</p>'
        return describe(controls)

    return run
