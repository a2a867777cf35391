"""The owner may pause, pin and heal; visitors only look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Page, expect

from delta_weight_sync.store import open_bucket
from inference_space.dashboard.controls import Owner
from tests.dashboard.told import KEY, REFUSED, Told, controlled


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def replica(told: Told, tmp_path: Path) -> Iterator[str]:
    with controlled(open_bucket(f"file://{tmp_path}/bucket", create=True), told) as url:
        yield url


@pytest.mark.full
def test_only_the_key_opens_the_controls(page: Page, replica: str, told: Told) -> None:
    page.goto(f"{replica}#owner")
    said = page.locator("#dws-owner-said")
    expect(said).to_contain_text("follows the newest version")
    page.get_by_role("button", name="Pause following").click()
    expect(page.locator(REFUSED)).to_contain_text("Only the owner may do this")
    page.get_by_label("Key").fill("a long guess")
    page.get_by_role("button", name="Heal").click()
    expect(page.locator(REFUSED)).to_contain_text("REPLICA_KEY")
    assert told.calls == []

    page.get_by_label("Key").fill(KEY)
    page.get_by_role("button", name="Pause following").click()
    expect(said).to_contain_text("It is paused")
    page.get_by_label("Version").fill("7")
    page.get_by_role("button", name="Pin this version").click()
    expect(said).to_contain_text("It stays at v7")
    page.get_by_label("Version").fill("")
    page.get_by_role("button", name="Pin this version").click()
    expect(page.locator(REFUSED)).to_contain_text("Give the version to pin")
    page.get_by_label("Version").fill("12")
    page.get_by_role("button", name="Pin this version").click()
    expect(page.locator(REFUSED)).to_contain_text("the run has no version 12")
    page.get_by_role("button", name="Heal").click()
    page.get_by_role("button", name="Follow the newest").click()
    expect(said).to_contain_text("follows the newest version")
    assert told.calls == ["pause", "pin 7", "heal", "resume"]


@pytest.mark.full
def test_without_a_key_nobody_could_use_the_tab_so_there_is_none(
    page: Page, told: Told, tmp_path: Path
) -> None:
    with controlled(open_bucket(f"file://{tmp_path}/bucket", create=True), told, key="") as url:
        page.goto(url)
        expect(page.locator("[data-tab]").first).to_be_visible()
        expect(page.locator("[data-tab=owner]")).to_have_count(0)
        assert "Pause following" not in page.content()


@pytest.mark.full
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
