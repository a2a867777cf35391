"""What the trainer box adds to the run's log: TRL's metrics, and what the replicas say of themselves."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
from pydantic import ValidationError
from transformers import TrainerCallback

from shared.runlog import ReplicaEvent, ReplicaReport, RunLogWriter, StepEvent

_POLL_S = 1.0


class StepRecorder(TrainerCallback):
    """Copies each of TRL's log lines into the run's log."""

    def __init__(self, log: RunLogWriter) -> None:
        self._log = log

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """One event per logged step that has a reward."""
        numbers = {key: float(value) for key, value in (logs or {}).items() if _is_number(value)}
        if "reward" in numbers:
            self._log.append(
                StepEvent(t=time.time(), step=state.global_step, reward=numbers["reward"], metrics=numbers)
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class ReplicaWatch:
    """Asks every replica for its status once a second; replicas only read the bucket, so we write it down."""

    def __init__(self, urls: Sequence[str], log: RunLogWriter) -> None:
        self._log = log
        self._after = dict.fromkeys(urls, -1)
        self._last: dict[str, ReplicaEvent] = {}
        self._http = httpx.Client(timeout=5.0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="replica-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()
        self._thread.join()

    def wait_for(self, version: int, timeout_s: float = 120.0) -> bool:
        """True once every replica serves `version`, False if that does not happen in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if all(url in self._last and self._last[url].version == version for url in self._after):
                return True
            time.sleep(_POLL_S / 2)
        return False

    def _loop(self) -> None:
        while not self._closed.wait(_POLL_S):
            for url in self._after:
                self._note(url, self._ask(url))

    def _ask(self, url: str) -> ReplicaReport:
        try:
            answer = self._http.get(f"{url}/status", params={"after": self._after[url]})
            return ReplicaReport.model_validate_json(answer.raise_for_status().content)
        except (httpx.HTTPError, ValidationError) as error:
            known = self._last.get(url)
            name = known.replica if known else url
            reason = f"{url} does not answer ({type(error).__name__})"
            gone = ReplicaEvent(
                t=time.time(), replica=name, state="unreachable", version=None, digest=None, error=reason
            )
            return ReplicaReport(status=gone, commits=())

    def _note(self, url: str, report: ReplicaReport) -> None:
        for commit in report.commits:
            self._log.append(commit)
            self._after[url] = max(self._after[url], commit.version)
        previous, now = self._last.get(url), report.status
        self._last[url] = now
        if previous is None or now.model_copy(update={"t": previous.t}) != previous:
            self._log.append(now)
