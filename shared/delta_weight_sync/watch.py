"""Looking out for new versions for ever, at a pace that a failing store can bear."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.history import RunReader
from delta_weight_sync.lookout import Lookout
from delta_weight_sync.protocol import POLL_S, Manifest

_DOUBLINGS = 5  # of the interval, failure by failure: at most half a minute lies between two looks


def watch(
    reader: RunReader, take: Callable[[Manifest], object], complain: Callable[[Exception], object]
) -> NoReturn:
    """Call `take(newest manifest)` at each new version; it ends with what `take` or a signal raises.

    `take` is called again where it failed, and may see a version twice. `complain` hears of each
    `DeltaWeightSyncError` and `OSError`, and of what was passed over, of a row of equal ones once; all other
    errors end the watch.
    """
    told, failures = "", 0
    error: Exception | None = None
    with contextlib.closing(Lookout(reader)) as lookout:
        while True:
            try:
                if _look(lookout, take):
                    error, failures = lookout.complaint(), 0
            except BrokenPipeError:  # nobody reads what `take` prints any more
                raise
            except (DeltaWeightSyncError, OSError) as caught:
                error, failures = caught, failures + 1
            if error and str(error) != told:
                complain(error)
            told = str(error or "")
            lookout.wait(POLL_S * 2 ** min(failures, _DOUBLINGS))


def _look(lookout: Lookout, take: Callable[[Manifest], object]) -> bool:
    """Look, if it is time to; True if that went well."""
    if not lookout.due():
        return False
    if manifest := lookout.look():
        take(manifest)
    lookout.taken()
    return True
