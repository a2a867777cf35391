"""Looking at a run's HEAD again and again, at a pace that a failing store can bear."""

from __future__ import annotations

from collections.abc import Callable

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import POLL_S, Manifest, ProtocolError

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
    seen, told, failures = "", "", 0
    while True:
        try:
            seen = _look(reader, seen, take)
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


def _look(reader: RunReader, seen: str, take: Callable[[Manifest], object]) -> str:
    """Take what HEAD names if it is not the HEAD with the etag `seen`; returns HEAD's etag."""
    info = reader.bucket.stat(reader.keys.head)
    head = reader.head() if info and info.etag != seen else None
    if info is None:
        raise ProtocolError(f"run {reader.keys.run!r} in {reader.bucket.url} has published no version yet")
    if head is not None:
        take(reader.manifest(head.manifest))
    return info.etag
