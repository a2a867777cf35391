"""The owner's tab of a live replica: what is clicked in a browser is what the weights do."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.live.replica import KEY, Replica, engine_of, greedy
from tests.live.run import Trainer
from tests.support.dashboard import REFUSED
from tests.support.waiting import soon

pytestmark = pytest.mark.live


@pytest.fixture
def tab(replica: Replica, page: Page) -> Page:
    page.goto(f"{replica.url}/#owner")
    return page


def test_an_owner_pauses_pins_and_joins_again(trainer: Trainer, replica: Replica, tab: Page) -> None:
    first = trainer.publisher.version
    assert first is not None
    digests = {first: replica.wait_for(first)["digest"]}
    joined = joins(replica)
    said, refused = tab.locator("#dws-owner-state"), tab.locator(REFUSED)
    expect(said).to_contain_text("follows the newest version")

    click(tab, "Pause following")
    expect(refused).to_contain_text("Only the owner may do this")
    tab.get_by_label("Key").fill("somebody-who-guesses-it")
    click(tab, "Heal")
    expect(refused).to_contain_text("REPLICA_KEY")
    publish(trainer, digests)
    digest = replica.wait_for(first + 1)["digest"]
    assert digest == digests[first + 1] != digests[first], "a visitor's click does nothing"

    tab.get_by_label("Key").fill(KEY)
    click(tab, "Pause following")
    expect(said).to_contain_text("It is paused")
    expect(refused).to_have_count(0)
    for _ in range(3):
        publish(trainer, digests)
    expect(tab.locator("#dws-live h1")).to_have_text(f"v{first + 4} serving on 0/1 replica")
    row = tab.locator(
        "#dws-live .stack tbody tr"
    )  # by the replica's own word: this run has no trainer's log of it
    expect(row).to_contain_text("3 versions behind")
    assert replica.status()["status"]["version"] == first + 1, "the dashboard has seen v4, the replica stays"

    click(tab, "Pin this version")
    expect(refused).to_contain_text("Enter the version to pin")
    pin(tab, first + 7)
    refusal = f"run 'live' has no version {first + 7}; its newest is version {first + 4}"
    expect(refused).to_contain_text(refusal)
    pin(tab, first + 2)
    expect(said).to_contain_text(f"It stays at v{first + 2}")
    assert replica.wait_for(first + 2)["digest"] == digests[first + 2]
    publish(trainer, digests)
    expect(tab.locator("#dws-live h1")).to_have_text(f"v{first + 5} serving on 0/1 replica")
    assert replica.status()["status"]["digest"] == digests[first + 2], (
        "exactly what was pinned, whatever comes"
    )

    click(tab, "Follow the newest")
    assert replica.wait_for(first + 5)["digest"] == digests[first + 5]
    assert joins(replica) == joined, "all of it by deltas"
    before, engine = greedy(replica.url), engine_of(replica).pid
    click(tab, "Heal")
    soon(lambda: joins(replica) == joined + 1)
    pin(tab, first)
    assert replica.wait_for(first)["digest"] == digests[first]
    click(tab, "Follow the newest")
    assert replica.wait_for(first + 5)["digest"] == digests[first + 5]
    assert greedy(replica.url) == before
    assert engine_of(replica).pid == engine, "all of it in one vLLM"


def publish(trainer: Trainer, digests: dict[int, str]) -> None:
    trainer.step()
    version = trainer.publish()
    digests[version] = trainer.writer.newest.digest


def pin(tab: Page, version: int) -> None:
    tab.locator(".view-owner").get_by_label("Version").fill(str(version))
    click(tab, "Pin this version")


def click(tab: Page, name: str) -> None:
    tab.get_by_role("button", name=name).click()


def joins(replica: Replica) -> int:
    """How often all weights were compared with a checkout."""
    commits: list[dict[str, Any]] = replica.status()["commits"]
    return sum(commit["joined"] for commit in commits)
