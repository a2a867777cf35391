"""The owner's tab of a live replica: what is clicked in a browser is what the weights do.

A pin of an earlier version than is served takes the same way as joining again; tests/inference/test_orders.py
goes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Page, expect

from tests.dashboard.chromium import chromium, watched_page
from tests.dashboard.told import REFUSED
from tests.live.replica import Replica, greedy
from tests.live.test_replica import Trainer
from trainer.policies import tiny

pytestmark = pytest.mark.live

KEY = "the-owner-of-this-replica"
PROMPTS = [[1, 5, 9, 100, 200, 33], [7] * 12]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    base = tmp_path_factory.mktemp("base")
    tiny.build(base, tie=True, seed=0)
    trainer = Trainer(tmp_path_factory.mktemp("bucket").as_uri(), base)
    trainer.publish()
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def replica(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("REPLICA_KEY", KEY)
        environment.setenv("REPLICA_OPEN_INFERENCE", "true")
        replica = Replica(trainer.bucket.url, "live", tmp_path_factory.mktemp("replica"))
        replica.start()
    replica.wait_for(0)
    yield replica
    replica.stop()


@pytest.fixture
def tab(replica: Replica) -> Iterator[Page]:
    with chromium() as browser, watched_page(browser) as page:
        page.goto(f"{replica.url}/#owner")
        yield page


def test_an_owner_pauses_pins_and_joins_again(trainer: Trainer, replica: Replica, tab: Page) -> None:
    digests = {0: trainer.writer.newest.digest}
    said, refused = tab.locator("#dws-owner-said"), tab.locator(REFUSED)
    expect(said).to_contain_text("follows the newest version")

    tab.get_by_label("Key").fill("somebody-who-guesses-it")
    click(tab, "Pause following")
    expect(refused).to_contain_text("Only the owner may do this")
    publish(trainer, digests)
    assert replica.wait_for(1)["digest"] == digests[1] != digests[0], "a visitor's click does nothing"

    tab.get_by_label("Key").fill(KEY)
    click(tab, "Pause following")
    expect(said).to_contain_text("It is paused")
    expect(refused).to_have_count(0)
    for _ in range(3):
        publish(trainer, digests)
    expect(tab.locator("#dws-live h1")).to_contain_text("v4 published")
    assert replica.status()["status"]["version"] == 1, "the dashboard has seen v4, the replica stays"

    pin(tab, 7)
    expect(refused).to_contain_text("run 'live' has no version 7, its newest is version 4")
    pin(tab, 2)
    expect(said).to_contain_text("It stays at v2")
    assert replica.wait_for(2)["digest"] == digests[2]
    publish(trainer, digests)
    expect(tab.locator("#dws-live h1")).to_contain_text("v5 published")
    assert replica.status()["status"]["digest"] == digests[2], "exactly what was pinned, whatever comes"

    click(tab, "Follow the newest")
    assert replica.wait_for(5)["digest"] == digests[5]
    assert starts(replica) == 1, "all of it by deltas"
    before = greedy(replica.url, PROMPTS)
    click(tab, "Re-join")
    replica._wait(lambda status: status["version"] is None, "a fresh start")
    assert replica.wait_for(5)["digest"] == digests[5]
    assert starts(replica) == 2
    assert greedy(replica.url, PROMPTS) == before


def publish(trainer: Trainer, digests: dict[int, str]) -> None:
    trainer.step()
    trainer.publish()
    digests[trainer.publisher.version] = trainer.writer.newest.digest


def pin(tab: Page, version: int) -> None:
    tab.locator(".view-owner").get_by_label("Version").fill(str(version))
    click(tab, "Pin this version")


def click(tab: Page, name: str) -> None:
    tab.get_by_role("button", name=name).click()


def starts(replica: Replica) -> int:
    """How often vLLM was started from a checkout."""
    commits: list[dict[str, Any]] = replica.status()["commits"]
    return sum(commit["joined"] for commit in commits)
