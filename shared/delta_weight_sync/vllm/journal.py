"""What a replica says of itself: what it is doing, what is wrong, and its last commits."""

from __future__ import annotations

import logging
import time
from collections import deque

from delta_weight_sync.errors import printable
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.runlog import CommitEvent, ReplicaEvent, ReplicaReport

_KEPT_COMMITS = 256
_log = logging.getLogger("delta_weight_sync")


class Journal:
    """Written by the follower's thread, read by any."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._state = "starting"
        self.error: str | None = None
        self._logged = ""
        self.signed_by: str | None = None  # whose signature of the served version was checked
        self._commits: deque[CommitEvent] = deque(maxlen=_KEPT_COMMITS)

    def note(self, state: str | None = None, error: str | None = None) -> None:
        """Take down what is going on; with an error the state stays what it was."""
        self._state, self.error = state or self._state, error

    def complain(self, reason: str, state: str | None = None) -> None:
        """Take down what went wrong, and log it unless it was logged last."""
        reason = printable(reason)
        self.note(state, reason)
        if reason != self._logged:
            _log.warning("replica %s: %s", self._replica, reason)
            self._logged = reason

    def passed_over(self, complaint: ProtocolError | None) -> None:
        """Take down what is wrong beside the sound version that is served; None where all is well."""
        if complaint:
            self.complain(str(complaint), "serving")
        elif self.error:
            self.note("serving")

    def commit(
        self,
        manifest: Manifest,
        fetch_s: float = 0.0,
        stage_s: float = 0.0,
        pause_s: float = 0.0,
        commit_s: float = 0.0,
        *,
        joined: bool = False,
    ) -> None:
        """Take down that a version is live."""
        now = time.time()
        event = CommitEvent(
            t=now,
            replica=self._replica,
            version=manifest.version,
            digest=manifest.digest,
            lag_s=now - manifest.created_at,
            fetch_s=fetch_s,
            stage_s=stage_s,
            pause_ms=1e3 * pause_s,
            commit_ms=1e3 * commit_s,
            joined=joined,
        )
        self._commits.append(event)

    def report(self, serving: Manifest | None, progress: str, notice: str, after: int) -> ReplicaReport:
        """All of it, with the commits of versions newer than `after`; `progress` of a download, or "".

        `notice`: how the replica learns of new versions.
        """
        status = ReplicaEvent(
            t=time.time(),
            replica=self._replica,
            state=f"{self._state}: {progress}" if progress else self._state,
            version=serving.version if serving else None,
            digest=serving.digest if serving else None,
            error=self.error,
            signed_by=self.signed_by if serving else None,
        )
        commits = tuple(commit for commit in list(self._commits) if commit.version > after)
        return ReplicaReport(status=status, commits=commits, notice=notice)
