"""The owner may pause, pin and re-join; visitors only look."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Page, expect

from inference_space.dashboard import mount
from inference_space.dashboard.controls import Following, Owner
from shared.buckets import open_bucket

KEY = "a long secret"


class Told:
    """A replica's controls that remember what they were told."""

    def __init__(self) -> None:
        self.now, self.calls = Following(paused=False, pinned=None), list[str]()

    def following(self) -> Following:
        return self.now

    def pause(self) -> None:
        self.calls.append("pause")
        self.now = Following(paused=True, pinned=None)

    def resume(self) -> None:
        self.calls.append("resume")
        self.now = Following(paused=False, pinned=None)

    def pin(self, version: int) -> None:
        if version > 9:
            raise ValueError(f"the run has no version {version}")
        self.calls.append(f"pin {version}")
        self.now = Following(paused=False, pinned=version)

    def rejoin(self) -> None:
        self.calls.append("rejoin")


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def replica(told: Told, tmp_path: Path) -> Iterator[str]:
    """A dashboard that is mounted with controls."""
    started = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        servers: list[uvicorn.Server] = []

        async def serve() -> None:
            bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
            app = mount(FastAPI(), bucket, None, controls=told, key=KEY)
            servers.append(
                uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
            )
            started.set()
            await servers[0].serve(sockets=[listening])

        thread = threading.Thread(target=asyncio.run, args=[serve()])
        thread.start()
        assert started.wait(60)
        while not servers[0].started:
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        servers[0].should_exit = True
        thread.join()


def test_only_the_key_opens_the_controls(page: Page, replica: str, told: Told) -> None:
    page.goto(f"{replica}#owner")
    said = page.locator("#dws-owner-said")
    expect(said).to_contain_text("follows the newest version")
    page.get_by_role("button", name="Pause following").click()
    expect(said.get_by_role("alert")).to_contain_text("Only the owner may do this")
    page.get_by_label("Key").fill("a long guess")
    page.get_by_role("button", name="Re-join").click()
    expect(said.get_by_role("alert")).to_contain_text("REPLICA_KEY")
    assert told.calls == []

    page.get_by_label("Key").fill(KEY)
    page.get_by_role("button", name="Pause following").click()
    expect(said).to_contain_text("It is paused")
    page.get_by_label("Version").fill("7")
    page.get_by_role("button", name="Pin this version").click()
    expect(said).to_contain_text("It stays at v7")
    page.get_by_label("Version").fill("12")
    page.get_by_role("button", name="Pin this version").click()
    expect(said.get_by_role("alert")).to_contain_text("the run has no version 12")
    page.get_by_role("button", name="Re-join").click()
    page.get_by_role("button", name="Follow the newest").click()
    expect(said).to_contain_text("follows the newest version")
    assert told.calls == ["pause", "pin 7", "rejoin", "resume"]


def test_a_dashboard_without_controls_has_no_such_tab(page: Page, url: str, bucket: object) -> None:
    page.goto(f"{url}#owner")
    expect(page.locator("#dws-live h1")).to_contain_text("Waiting for a trainer")
    expect(page.locator("[data-tab=owner]")).to_have_count(0)
    expect(page.get_by_role("button", name="Pause following")).to_have_count(0)


@pytest.mark.parametrize(
    ("owner", "key", "login", "allowed"),
    [
        (Owner("secret", "ada"), "secret", "", True),
        (Owner("secret", "ada"), "", "ada", True),
        (Owner("secret", "ada"), "Secret", "bob", False),
        (Owner("", ""), "", "", False),
        (Owner("", "ada"), "", "", False),
        (Owner("ключ", ""), "ключ", "", True),
    ],
)
def test_who_is_the_owner(owner: Owner, key: str, login: str, allowed: bool) -> None:
    assert owner.allows(key, login) is allowed
