"""Names, states, errors, prompts and answers come from outside: whatever they hold, they stay text."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from delta_weight_sync.runlog import Rollout, StepEvent
from delta_weight_sync.store import ObjectInfo
from inference_space.dashboard import views
from inference_space.dashboard.data import RunView
from inference_space.dashboard.owner import Owner, guarded
from inference_space.dashboard.page import first_paint, render
from inference_space.dashboard.state import Progress
from inference_space.dashboard.views import OpenedDelta, TensorRow, inside
from inference_space.settings import SETUP
from tests.inference_space.dashboard.test_state import progress
from tests.support.dashboard import KEY, RecordedControls
from tests.support.records import canary, commit, manifest_of, status, sync

ATTACK = """</p></style><script>alert(1)</script><img src=x onerror=a()>" onload="a()' onload='a()"""


class Parsed(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text = set[str](), dict[str, str | None](), ""
        self.feed(str(page))  # plain: what is cut out of Markup is Markup again
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def run() -> Progress:
    answers = (Rollout(turns=((ATTACK, ATTACK), ("crane", f"c1-r2?{ATTACK}")), reward=0.5, sync=1),)
    group = StepEvent(t=0, step=1, reward=0.5, metrics={}, prompt=ATTACK, rollouts=answers)
    joined = [commit(ATTACK, 1), status(f"2 {ATTACK}", 1, state=ATTACK, error=ATTACK)]
    return progress(sync(1, 30), *joined, canary(ATTACK, 1, 9.0), group)


def test_the_page_says_whose_signature_a_replica_checked() -> None:
    said = status("x", 1).model_copy(update={"signed_by": "d95e4c70b679c0ad"})
    for event, words in ((said, " signed by d95e4c70b679c0ad"), (status("x", 1), "")):
        page = render(view(progress(sync(1, 9), commit("x", 1), event)))
        text = " ".join(Parsed(str(page)).text.split())
        assert words in text
        assert ("signed by" in text) == bool(words)


def test_the_page_names_a_replica_whose_logprobs_differ() -> None:
    for difference, alarm in ((0.7, True), (0.02, False)):
        page = render(view(progress(sync(1, 9), canary("x", 1, difference))))
        text = " ".join(Parsed(str(page)).text.split())
        assert re.search(rf"Canary ?{difference} ?largest error of a logprob; alarm above 0.5", text)
        assert ("x reports v1, but its logprobs are off by 0.7" in text) == alarm


def delta() -> OpenedDelta:
    names = (ATTACK, f"model.layers.0.{ATTACK}", f"model.layers.1.mlp.{ATTACK}")
    return OpenedDelta(
        0, 1, "fast", tuple(TensorRow(name, (2, 3), 1, 6, ATTACK) for name in names), None, ATTACK
    )


def view(run: Progress | None, *, read: bool = True, problem: str | None = None) -> RunView:
    return RunView(ATTACK, ATTACK, model=ATTACK, read=read, problem=problem, progress=run)


def listing() -> str:
    keys = (f"runs/r/{ATTACK}/{ATTACK}", f"runs/r/deltas/00000001.{ATTACK}")
    return views.listing([ObjectInfo(key, 1, "") for key in keys], ATTACK, 0, served=True)


def refused() -> str:
    def fail(version: int | None) -> None:
        raise ValueError(ATTACK)

    return guarded(RecordedControls(), Owner(KEY), fail)(KEY, None, None)[1]


VIEWS: dict[str, Callable[[], str]] = {
    "run": lambda: render(view(run(), problem=ATTACK)),
    "prerendered": lambda: first_paint(view(run()), owner=True),
    "reading": lambda: render(view(None, read=False)),
    "waiting": lambda: render(view(None)),
    "not readable": lambda: render(view(None, problem=ATTACK)),
    "bucket": listing,
    "delta": lambda: views.opened(manifest_of(1, 0), delta(), served=True),
    "inside a delta": lambda: inside(delta()),
    "owner": refused,
    "set-up": lambda: SETUP.page({ATTACK: ATTACK}),
}


@pytest.mark.parametrize("name", VIEWS)
def test_hostile_text_stays_text(name: str) -> None:
    page = Parsed(VIEWS[name]())
    assert ATTACK in page.text
    assert not page.tags & {"script", "img"}
    assert not page.attributes.keys() & {"onerror", "onload"}
