"""The owner's tab: pause, pin and heal a replica. Visitors see the tab, but cannot use it."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import gradio as gr
from gradio.utils import get_space
from markupsafe import Markup

from delta_weight_sync.errors import BucketError
from inference_space.dashboard.html import render_template

if TYPE_CHECKING:  # the dashboard also runs without a replica
    from delta_weight_sync.vllm.follower import Commands as Controls

# Set by the Hub in a Space whose README says `hf_oauth: true`; Gradio reads all four.
_LOGIN_SETTINGS = ("OAUTH_CLIENT_ID", "OAUTH_CLIENT_SECRET", "OAUTH_SCOPES", "OPENID_PROVIDER_URL")
_REFUSED = (
    "Only the owner may do this: enter the replica's key (its setting REPLICA_KEY), or log in as the owner."
)


@dataclass(frozen=True)
class Owner:
    """The clients that may use the controls: those with the key, and the Hugging Face account `name`."""

    key: str = ""
    name: str = ""

    def allows(self, key: str, login: str) -> bool:
        """Whether the key or the login is the owner's. An empty key or login never is."""
        pairs = (key, self.key), (login, self.name)
        return any(own and hmac.compare_digest(given.encode(), own.encode()) for given, own in pairs)


def space_author() -> str:
    """Return the Space's author if visitors can log in here, else an empty string."""
    return "" if login_problem() else os.environ.get("SPACE_AUTHOR_NAME", "")


def login_problem() -> str:
    """Say why visitors cannot log in here, and the fix; empty if they can. Outside of a Space, Gradio would
    log every visitor in as this machine's account."""
    if not os.environ.get("SPACE_ID"):
        return "Login with Hugging Face works only in a Space."
    if get_space() is None:  # Gradio's own condition
        return "To log in with Hugging Face, set SYSTEM=spaces in the Space's Dockerfile."
    if not all(os.environ.get(name) for name in _LOGIN_SETTINGS):
        return "To log in with Hugging Face, set hf_oauth: true at the top of the Space's README.md."
    return ""


def owner_tab(controls: Controls, owner: Owner) -> None:
    """Add the tab's components to the Blocks that are being built."""

    def pin(version: str) -> None:
        if not version.strip().isdecimal():
            raise ValueError("Enter the version to pin: a whole number, 0 or larger.")
        controls.pin(int(version))

    gr.HTML("<h1>This replica</h1>", apply_default_css=False)
    state = gr.HTML(lambda: describe(controls), elem_id="dws-owner-state", apply_default_css=False)
    if owner.name:
        gr.LoginButton(size="md", icon=None)
    else:
        gr.HTML(Markup('<p class="mute">{}</p>').format(login_problem()), apply_default_css=False)
    key = gr.Textbox(label="Key", type="password", visible=bool(owner.key), elem_id="dws-key")
    with gr.Row():
        acts = {
            gr.Button("Pause following"): lambda _: controls.pause(),
            gr.Button("Follow the newest"): lambda _: controls.resume(),
            gr.Button("Heal"): lambda _: controls.heal(),
        }
    with gr.Row():
        version = gr.Textbox(label="Version")  # a Number would log a traceback for text
        acts[gr.Button("Pin this version")] = pin
    answer = gr.HTML("", elem_id="dws-owner-answer", apply_default_css=False)
    gr.HTML(render_template("actions.html"), apply_default_css=False)
    for button, act in acts.items():
        run = guarded(controls, owner, act)
        button.click(run, [key, version], [state, answer], show_progress="hidden")


def describe(controls: Controls) -> Markup:
    return render_template("following.html", controls=controls)


def guarded(
    controls: Controls, owner: Owner, act: Callable[[str], None]
) -> Callable[[str | None, str | None, gr.OAuthProfile | None], tuple[str, str]]:
    """Let only the owner `act`. The handler returns what the replica follows, and why `act` was refused."""

    # Gradio fills in the profile from its signed session; a visitor cannot send one.
    def run(key: str | None, version: str | None, profile: gr.OAuthProfile | None) -> tuple[str, str]:
        refused = ""
        try:
            if not owner.allows(key or "", profile.username if profile else ""):
                raise ValueError(_REFUSED)
            act(version or "")
        except (ValueError, BucketError) as error:
            refused = Markup('<p class="alert" role="alert">{}</p>').format(error)
        return describe(controls), refused

    return run
