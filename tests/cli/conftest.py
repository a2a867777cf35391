"""A run that a test goes on writing while the command follows it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from delta_weight_sync.store._notifications import Notifications
from tests.support.real_run import Drifting

Turns = Callable[..., list[float]]


@pytest.fixture
def writes(tmp_path: Path) -> Iterator[Callable[..., Drifting]]:
    """Begins a run in `tmp_path / "bucket"`, in place of the one that is there."""
    with ExitStack() as stack:

        def begin(**changes: object) -> Drifting:
            run = Drifting(tmp_path / "bucket", **changes)
            stack.callback(run.close)
            return run

        yield begin


@pytest.fixture
def run(writes: Callable[..., Drifting]) -> Drifting:
    return writes()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """`turns(first, second, ...)`: what happens in each pause of `follow`; in the next one Ctrl-C is pressed.

    Returns the lengths of the pauses, in seconds; nobody waits for them.
    """

    def set_up(*happens: Callable[[], object]) -> list[float]:
        pauses: list[float] = []

        def wait(notice: Notifications, seconds: float) -> None:
            if len(pauses) == len(happens):
                raise KeyboardInterrupt
            pauses.append(seconds)
            happens[len(pauses) - 1]()
            notice.reset()

        monkeypatch.setattr(Notifications, "wait", wait)
        monkeypatch.setattr("delta_weight_sync.watch.monotonic", lambda: sum(pauses))
        return pauses

    return set_up
