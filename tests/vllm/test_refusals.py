"""What vLLM refuses is tried again after growing pauses, and at once if something is different."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from delta_weight_sync.errors import EngineError
from delta_weight_sync.vllm.follower import Follower
from tests.support.buckets import CountedBucket
from tests.support.fake_vllm import InMemoryVllm, soon, wait_until_serving
from tests.support.real_run import RealRun


class Refusing(InMemoryVllm):
    """A vLLM in which `learn` or `commit` is refused, while there is something to say."""

    def __init__(self) -> None:
        super().__init__()
        self.unfit: EngineError | None = None
        self.damaged: EngineError | None = None
        self.learned = 0
        self.committed = 0
        self.shuffled = False

    def start(self, checkpoint: Path) -> None:
        if self.starts:  # what was damaged ended with the process
            self.damaged = None
        super().start(checkpoint)

    def learn(self, shapes: dict[str, list[int]], dtypes: dict[str, str]) -> str:
        self.learned += 1
        if self.unfit:
            raise self.unfit
        return "0" * 16 if self.shuffled else super().learn(shapes, dtypes)

    def commit(self, digest: str, label: str) -> tuple[float, float, float]:
        self.committed += 1
        if self.damaged:
            raise self.damaged
        return super().commit(digest, label)


UNFIT = EngineError("head.weight: vLLM changes it after loading", "route")
DAMAGED = EngineError("the staged changes give digest 1, but the published one is 2", "codec")
FULL = EngineError("OutOfMemoryError: no memory is left", "unexpected")


@pytest.fixture
def run(bucket: CountedBucket) -> Iterator[RealRun]:
    """At version 2."""
    run = RealRun(bucket.bucket, run="refused", layers=1)
    run.step()
    run.step()
    yield run
    run.close()


@pytest.fixture
def vllm() -> Refusing:
    return Refusing()


def turns(bucket: CountedBucket, number: int = 5) -> None:
    """Wait until the follower has looked at HEAD so many times more."""
    before = bucket.asked["stat"]
    soon(lambda: bucket.asked["stat"] > before + number, "more turns")


def refuses(follower: Follower, sentence: str) -> None:
    soon(lambda: sentence in (follower.report(0).status.error or ""), f"{follower.report(0).status}")


def test_a_model_that_no_delta_fits_is_not_tried_with_each_version(
    follower, run, vllm, bucket, monkeypatch
) -> None:
    for limit in ("FIRST_S", "LONGEST_S"):
        monkeypatch.setattr(f"delta_weight_sync.watch.{limit}", 60.0)
    vllm.unfit = UNFIT
    follower.start()
    refuses(follower, "head.weight: vLLM changes it after loading")
    for _ in range(3):
        run.step()
        turns(bucket, 3)
    assert (vllm.learned, vllm.starts) == (1, 1)
    assert follower.report(0).status.state == "refused"
    vllm.unfit = None
    follower.commands.heal()
    wait_until_serving(follower, 5)
    assert follower.report(0).status.error is None


def test_a_vllm_in_which_routes_do_not_read_what_it_has_just_loaded_never_serves(follower, vllm) -> None:
    """It keeps the weights in an order of its own: written by these routes they would be other weights."""
    vllm.shuffled = True
    follower.start()
    refuses(follower, "would change have digest 0000000000000000")
    follower.commands.heal()
    soon(lambda: vllm.starts == 2, "another start")
    refuses(follower, "would change have digest 0000000000000000")
    assert vllm.committed == 0
    vllm.shuffled = False
    follower.commands.heal()
    wait_until_serving(follower, 2)
    soon(lambda: follower.report(0).status.error is None, "no error")


def test_another_anchor_is_tried(follower: Follower, run: RealRun, vllm: Refusing) -> None:
    vllm.unfit = UNFIT
    follower.start()
    refuses(follower, "head.weight")
    vllm.unfit = None
    run.rate = 1.0
    anchor = run.reader.manifest(2).anchor
    while (newest := run.step()).anchor == anchor:
        pass
    wait_until_serving(follower, newest.version)


def test_another_version_is_tried_if_the_owner_pins_it(follower, run, vllm) -> None:
    vllm.damaged = DAMAGED
    follower.start()
    refuses(follower, "the published one is 2")
    vllm.damaged = None
    follower.commands.pin(1)
    wait_until_serving(follower, 1)


def refuses_the_third(follower: Follower, run: RealRun, vllm: Refusing) -> None:
    """It serves version 2, and vLLM does not take the next one."""
    follower.start()
    wait_until_serving(follower, 2)
    vllm.damaged = DAMAGED
    run.step()
    refuses(follower, "the published one is 2")


def test_what_is_served_is_served_on_while_the_next_version_is_refused(follower, run, vllm) -> None:
    refuses_the_third(follower, run, vllm)
    assert follower.report(0).status.state == "serving"
    assert vllm.digest() == run.reader.manifest(2).digest
    vllm.damaged = None  # the next version has the same anchor, but vLLM has not refused the model
    run.step()
    wait_until_serving(follower, 4)
    assert vllm.starts == 1
    soon(lambda: follower.report(0).status.error is None, "no error")


def test_what_may_pass_is_tried_until_it_does(follower: Follower, vllm: Refusing) -> None:
    vllm.damaged = FULL
    follower.start()
    soon(lambda: vllm.committed > 3, "more tries")
    vllm.damaged = None
    wait_until_serving(follower, 2)


def test_a_vllm_that_died_is_another_one(follower: Follower, run: RealRun, vllm: Refusing) -> None:
    refuses_the_third(follower, run, vllm)
    vllm.kill()
    wait_until_serving(follower, 3)
    assert vllm.starts == 2
