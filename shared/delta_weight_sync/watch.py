"""Looking at a run's HEAD again and again, at a pace that a failing store can bear."""

from __future__ import annotations

from collections.abc import Callable

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.history import RunReader
from delta_weight_sync.lookout import Lookout
from delta_weight_sync.protocol import POLL_S, Manifest

_DOUBLINGS = 5  # of the interval, failure by failure: at most half a minute lies between two looks


def watch(
    reader: RunReader,
    take: Callable[[Manifest], object],
    *,
    wait: Callable[[float], object],
    complain: Callable[[Exception], object],
) -> None:
    """Call `take(newest manifest)` at each move of HEAD, until `wait(seconds)` returns something true.

    `take` is called again where it failed, and may see a version twice. `complain` hears of each
    `DeltaWeightSyncError` and `OSError`, of a row of equal ones once; all other errors end the watch.
    """
    lookout, told, failures = Lookout(reader), "", 0
    while True:
        try:
            if manifest := lookout.look():
                take(manifest)
            lookout.taken()
            told, failures = "", 0
        except BrokenPipeError:  # nobody reads what `take` prints any more
            raise
        except (DeltaWeightSyncError, OSError) as error:
            failures += 1
            if str(error) != told:
                complain(error)
            told = str(error)
        if wait(POLL_S * 2 ** min(failures, _DOUBLINGS)):
            return
