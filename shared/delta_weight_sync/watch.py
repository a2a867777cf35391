"""Looking out for new versions for ever, at a pace that a failing store can bear."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.history import RunReader
from delta_weight_sync.lookout import Lookout
from delta_weight_sync.protocol import POLL_S, Manifest


def watch(
    reader: RunReader,
    take: Callable[[Manifest], object],
    complain: Callable[[Exception], object],
    seen: Manifest | None = None,
) -> NoReturn:
    """Call `take(newest manifest)` at each new version; it ends with what `take` or a signal raises.

    `take` is called again where it failed, ever more slowly, and may see a version twice, but none that is
    older than `seen`, or than one that it saw. `complain` hears of each `DeltaWeightSyncError` and `OSError`,
    and of what was passed over, of a row of equal ones once; all other errors end the watch.
    """
    told = ""
    error: Exception | None = None
    with contextlib.closing(Lookout(reader, seen=seen)) as lookout:
        while True:
            try:
                if lookout.take(take):
                    error = lookout.complaint()
            except BrokenPipeError:  # nobody reads what `take` prints any more
                raise
            except (DeltaWeightSyncError, OSError) as caught:
                error = caught
            if error and str(error) != told:
                complain(error)
            told = str(error or "")
            lookout.wait(POLL_S)


def newest(reader: RunReader, seen: Manifest | None) -> Manifest:
    """The newest version now; raises as `Lookout.look`, and `ProtocolError` where `seen` is newer."""
    with contextlib.closing(Lookout(reader, seen=seen)) as lookout:
        manifest = lookout.look()
    assert manifest is not None, "nothing was taken before"
    return manifest
