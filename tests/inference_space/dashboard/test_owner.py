"""The owner may pause, pin and heal, with the key or logged in with Hugging Face; visitors only look."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse
from playwright.sync_api import Page, expect
from starlette.testclient import TestClient

from delta_weight_sync.store import open_bucket
from inference_space.dashboard import page
from inference_space.dashboard.page import Owner
from tests.support.dashboard import KEY, REFUSED, RecordedControls, dashboard, mounted
from tests.support.serving import serving
from tests.support.waiting import soon

SPACE = {"SYSTEM": "spaces", "SPACE_ID": "ada/replica", "SPACE_AUTHOR_NAME": "ada"}
GRANTED = {"OAUTH_CLIENT_ID": "the-space", "OAUTH_CLIENT_SECRET": "s" * 32, "OAUTH_SCOPES": "openid profile"}


@pytest.mark.parametrize(("key", "there"), [("", False), ("a key", True)])
def test_without_a_key_and_a_login_there_is_no_tab(tmp_path, monkeypatch, key: str, there: bool) -> None:
    monkeypatch.setenv("SPACE_AUTHOR_NAME", "ada")
    app = mounted(open_bucket(f"file://{tmp_path}", create=True), controls=RecordedControls(), key=key)
    page = TestClient(app).get("/").text
    assert ('data-first="owner"' in page, "Pause following" in page) == (there, there)


@pytest.mark.parametrize(
    ("given", "key", "login", "allowed"),
    [
        (Owner("secret", "ada"), "secret", "", True),
        (Owner("secret", "ada"), "", "ada", True),
        (Owner("secret", "ada"), "Secret", "bob", False),
        (Owner("", ""), "", "", False),
        (Owner("", "ada"), "", "", False),
        (Owner("ключ", ""), "ключ", "", True),
    ],
)
def test_who_is_the_owner(given: Owner, key: str, login: str, allowed: bool) -> None:
    assert given.allows(key, login) is allowed


@pytest.mark.parametrize(
    ("set_to", "why"),
    [
        ({}, "works only in a Space"),
        ({"SPACE_ID": "ada/replica"} | GRANTED, "set SYSTEM=spaces"),
        (GRANTED | {"OPENID_PROVIDER_URL": "https://huggingface.co"}, "works only in a Space"),
        (SPACE, "set hf_oauth: true"),
        (SPACE | GRANTED, "set hf_oauth: true"),
    ],
)
def test_a_missing_login_setting_is_named(monkeypatch, set_to: dict[str, str], why: str) -> None:
    for name in ("SYSTEM", "SPACE_ID", *page._LOGIN_SETTINGS):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert why in page.login_problem()


@pytest.mark.full
def test_what_the_owner_clicks_is_what_the_replica_is_told(page: Page, tmp_path: Path) -> None:
    told = RecordedControls()

    def click(name: str, version: str = "") -> None:
        page.locator(".view-owner").get_by_label("Version").fill(version)
        page.get_by_role("button", name=name).click()

    with dashboard(open_bucket(f"file://{tmp_path}", create=True), told) as url:
        page.goto(f"{url}#owner")
        said = page.locator("#dws-owner-state")
        refused = page.locator(REFUSED)
        page.get_by_label("Key").fill("somebody-who-guesses-it")
        click("Heal")
        expect(refused).to_contain_text("REPLICA_KEY")
        page.get_by_label("Key").fill(KEY)
        click("Pause following")
        expect(said).to_contain_text("It is paused")
        expect(refused).to_have_count(0)
        click("Pin this version")
        expect(refused).to_contain_text("Enter the version to pin")
        click("Pin this version", "10")
        expect(refused).to_contain_text("the run has no version 10")
        click("Pin this version", "7")
        expect(said).to_contain_text("It stays at v7")
        click("Heal")
        soon(lambda: "heal" in told.calls)
        click("Follow the newest")
        expect(said).to_contain_text("follows the newest version")
    assert told.calls == ["pause", "pin 7", "heal", "resume"]


@pytest.mark.full
def test_the_author_is_the_owner_and_another_is_not(page: Page, tmp_path: Path) -> None:
    pytest.importorskip("authlib", reason="logging in needs authlib: pip install 'gradio[oauth]'")
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    names = iter(("bob", "ada"))
    with serving(provider(names)) as hub:
        environment = os.environ | SPACE | GRANTED | {"OPENID_PROVIDER_URL": hub}
        command = [sys.executable, "-m", "tests.support.dashboard", bucket.url]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as space:
            assert space.stdout
            page.goto(f"{space.stdout.readline().strip()}#owner")
            said = page.locator("#dws-owner-state")

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


def provider(names: Iterator[str]) -> FastAPI:
    """An OpenID provider that asks for no password: each visitor is the next of `names`."""
    from joserfc import jwt
    from joserfc.jwk import RSAKey

    app = FastAPI()
    key = RSAKey.generate_key(2048, {"kid": "1"})
    nonces = dict[str, str]()

    @app.get("/.well-known/openid-configuration")
    def configuration(request: Request) -> dict[str, Any]:
        url = str(request.base_url)[:-1]
        return {
            "issuer": url,
            "authorization_endpoint": f"{url}/authorize",
            "token_endpoint": f"{url}/token",
            "jwks_uri": f"{url}/keys",
            "id_token_signing_alg_values_supported": ["RS256"],
        }

    @app.get("/keys")
    def keys() -> dict[str, Any]:
        return {"keys": [key.as_dict(private=False)]}

    @app.get("/authorize")
    def authorize(redirect_uri: str, state: str, nonce: str) -> RedirectResponse:
        nonces["a-code"] = nonce
        return RedirectResponse(f"{redirect_uri}&{urlencode({'code': 'a-code', 'state': state})}")

    @app.post("/token")
    async def token(request: Request) -> dict[str, Any]:
        form = await request.form()
        name = next(names)
        now = int(time.time())
        url = str(request.base_url)[:-1]
        claims = {"iss": url, "sub": "1", "aud": "the-space", "iat": now, "exp": now + 600}
        claims |= {"nonce": nonces[str(form["code"])], "name": name, "preferred_username": name}
        claims |= {"profile": f"{url}/{name}", "picture": ""}
        signed = jwt.encode({"alg": "RS256", "kid": "1"}, claims, key)
        return {"access_token": "t", "token_type": "bearer", "expires_in": 600, "id_token": signed}

    return app
