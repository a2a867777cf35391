"""Logging in with Hugging Face: what it needs is said, and with it the Space's author is its owner."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Page, expect

from delta_weight_sync.store import open_bucket
from inference_space.dashboard import login
from tests.dashboard.provider import provider
from tests.dashboard.told import REFUSED, served

SPACE = {"SYSTEM": "spaces", "SPACE_ID": "ada/replica", "SPACE_AUTHOR_NAME": "ada"}
GRANTED = {"OAUTH_CLIENT_ID": "the-space", "OAUTH_CLIENT_SECRET": "s" * 32, "OAUTH_SCOPES": "openid profile"}


@pytest.mark.parametrize(
    ("set_to", "why"),
    [
        ({}, "works in a Space only"),
        ({"SPACE_ID": "ada/replica"} | GRANTED, "set SYSTEM=spaces"),
        (GRANTED | {"OPENID_PROVIDER_URL": "https://huggingface.co"}, "works in a Space only"),
        (SPACE, "set hf_oauth: true"),
        (SPACE | GRANTED, "set hf_oauth: true"),
    ],
)
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, set_to: dict[str, str], why: str) -> None:
    for name in ("SYSTEM", "SPACE_ID", *login._NEEDS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPACE_AUTHOR_NAME", "ada")
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert why in login.hindrance()
    assert login.author() == ""


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SPACE | GRANTED | {"OPENID_PROVIDER_URL": "https://huggingface.co"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(login, "_LIBRARIES", ("a_library_that_is_not_there",))
    assert "install gradio[oauth]" in login.hindrance()


@pytest.mark.full
def test_the_author_is_the_owner_and_another_is_not(page: Page, tmp_path: Path) -> None:
    pytest.importorskip("authlib", reason="logging in needs authlib: pip install 'gradio[oauth]'")
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    names = iter(("bob", "ada"))
    with served(lambda url: provider(url, names)) as hub:
        environment = os.environ | SPACE | GRANTED | {"OPENID_PROVIDER_URL": hub}
        command = [sys.executable, "-m", "tests.dashboard.told", bucket.url]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as space:
            assert space.stdout
            page.goto(f"{space.stdout.readline().strip()}#owner")
            said = page.locator("#dws-owner-said")

            page.get_by_role("button", name="Sign in with Hugging Face").click()
            back_at_the_owners_tab(page)
            expect(page.get_by_role("button", name="Logout (bob)")).to_be_visible()
            page.get_by_role("button", name="Pause following").click()
            expect(page.locator(REFUSED)).to_contain_text("Only the owner may do this")

            page.get_by_role("button", name="Logout (bob)").click()
            back_at_the_owners_tab(page)
            page.get_by_role("button", name="Sign in with Hugging Face").click()
            back_at_the_owners_tab(page)
            expect(page.get_by_role("button", name="Logout (ada)")).to_be_visible()
            page.get_by_role("button", name="Pause following").click()
            expect(said).to_contain_text("It is paused")
            assert space.stdin
            space.stdin.close()


def back_at_the_owners_tab(page: Page) -> None:
    expect(page).to_have_url(re.compile("/$"))
    page.locator("[data-tab=owner]").click()
