"""Logging in with Hugging Face: whom it makes the owner, and what is missing where it cannot work."""

from __future__ import annotations

import os
from importlib.util import find_spec

from gradio.utils import get_space

# What the Hub sets in a Space whose README says `hf_oauth: true`; Gradio reads all four.
_NEEDS = ("OAUTH_CLIENT_ID", "OAUTH_CLIENT_SECRET", "OAUTH_SCOPES", "OPENID_PROVIDER_URL")
_LIBRARIES = ("authlib", "itsdangerous")


def author() -> str:
    """The Space's author, if visitors can log in here, else nobody."""
    return "" if hindrance() else os.environ.get("SPACE_AUTHOR_NAME", "")


def hindrance() -> str:
    """Why nobody can log in here, as a sentence with the fix; empty where it works.

    Outside of a Space Gradio would log every visitor in as the account of this machine: never there.
    """
    if not os.environ.get("SPACE_ID"):
        return "Logging in with Hugging Face works in a Space only."
    if get_space() is None:  # as Gradio sees it
        return "To log in with Hugging Face, set SYSTEM=spaces in the Space's Dockerfile."
    if not all(os.environ.get(name) for name in _NEEDS):
        return "To log in with Hugging Face, set hf_oauth: true at the top of the Space's README.md."
    if not all(find_spec(name) for name in _LIBRARIES):
        return "To log in with Hugging Face, install gradio[oauth] in place of gradio."
    return ""
