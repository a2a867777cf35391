"""Logs rollouts, metrics and the states of replicas, and notifies replicas of new versions (pokes)."""

import contextlib
import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import httpx
from transformers import TrainerCallback

from delta_weight_sync.runlog import (
    METRICS,
    ReplicaEvent,
    ReplicaReport,
    Rollout,
    RunLogWriter,
    StepEvent,
    finite,
)
from delta_weight_sync.util import Guard
from trainer import spaces
from trainer.spaces import Fleet

POKE_PATH = "/delta_weight_sync/poke"
POKE_TIMEOUT_S = 5.0
_POLL_S = 1.0
_GROUP_EVERY_S = 5.0
_ASKED_AT_ONCE = 16  # replicas
_log = logging.getLogger(__name__)


class StepRecorder(TrainerCallback):
    """Writes TRL's metrics and the environments' rates to the log, and every few seconds a group of rollouts.

    Before step 1, groups are logged as step 0, so that the dashboard shows rollouts early. A recorder takes
    the place of TRL's queue of samples, so the recorder sees all samples.
    """

    def __init__(self, log: RunLogWriter, samples: Any) -> None:
        self._log = log
        self._samples = samples
        self._current: list[Any] = []  # the group that is arriving
        self._complete: list[Any] = []  # the newest complete group; empty once it is in the log
        self._group_due = 0.0
        self._taken = 0  # samples since the last logged step
        self._counts: dict[str, tuple[int, int]] = {}  # of these samples' rates, by name
        self._guard = Guard("the record of a step")
        self._before_first = False  # whether no step of this run is in the log yet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

    def get(self, *args: Any, **options: Any) -> Any:
        sample = self._samples.get(*args, **options)
        with self._guard:
            self._note(sample)
        return sample

    def _note(self, sample: Any) -> None:
        if self._current and self._current[0].group_id != sample.group_id:
            self._complete = self._current
            self._current = []
            if self._before_first and time.monotonic() >= self._group_due:
                self._append(0, {"sample/taken": float(self._taken)})
        self._current.append(sample)
        self._taken += 1
        for name, (count, total) in getattr(sample, "rates", {}).items():  # TRL's samples have none
            earlier_count, earlier_total = self._counts.get(name, (0, 0))
            self._counts[name] = earlier_count + count, earlier_total + total

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._before_first = not state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        with self._guard:
            self._note_step(state.global_step, logs or {})

    def _note_step(self, step: int, logs: Mapping[str, Any]) -> None:
        found = ((key, n) for key, value in logs.items() if (n := finite(value)) is not None)
        rates = {name: count / total for name, (count, total) in self._counts.items() if total}
        metrics = dict(itertools.islice(found, METRICS - len(rates)))
        if "reward" not in metrics:
            return
        self._taken = 0
        self._counts = {}
        self._before_first = False
        self._append(step, metrics | rates)

    def _append(self, step: int, metrics: dict[str, float]) -> None:
        group: list[Any] = []
        if time.monotonic() >= self._group_due:
            group = self._complete
            self._complete = []
            self._group_due = time.monotonic() + _GROUP_EVERY_S
        rollouts = [
            Rollout(turns=_turns(s.completion), reward=finite(s.metrics.get("reward")), sync=s.model_version)
            for s in group
        ]
        event = StepEvent(
            t=time.time(),
            step=step,
            reward=metrics.get("reward"),
            metrics=metrics,
            prompt=_text(group[0].prompt[-1]) if group else "",
            rollouts=tuple(rollouts),
        )
        self._log.append(event)


def _turns(completion: Sequence[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Return a conversation as the log shows it."""
    turns: list[tuple[str, str]] = []
    for message in completion:
        if message["role"] == "assistant":
            turns.append((_text(message), ""))
        elif turns:
            turns[-1] = (turns[-1][0], turns[-1][1] + _text(message))
    return tuple(turns)


def _text(message: dict[str, Any]) -> str:
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    words = [" ".join(map(str, call.values())) if isinstance(call, dict) else str(call) for call in calls]
    return " ".join(filter(None, [str(message.get("content") or ""), *words]))


class ReplicaWatch:
    """Polls and logs the status of every replica, because replicas cannot write to the bucket."""

    def __init__(self, fleet: Fleet, log: RunLogWriter) -> None:
        self._fleet = fleet
        self._log = log
        self._guard = Guard("the watch over the replicas")
        self._after = defaultdict[str, int](lambda: -1)  # by URL: the newest version with a logged commit
        self._last: dict[str, ReplicaEvent] = {}
        self._http = spaces.Clients(timeout_s=5.0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="replica-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(10.0)  # a faulty replica may send its status for ever
        self._http.close()

    def wait_for(self, version: int, timeout_s: float = 120.0) -> bool:
        """Wait until every replica serves `version`. Returns False if that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            last = [self._last.get(url) for url in self._fleet.urls()]
            if all(replica and replica.version == version for replica in last):
                return True
            time.sleep(_POLL_S / 2)
        return False

    def _loop(self) -> None:
        with ThreadPoolExecutor(_ASKED_AT_ONCE, "replica-status") as pool:
            while not self._closed.wait(_POLL_S):
                with self._guard:
                    urls = self._fleet.urls()
                    # Together, because a replica that does not answer takes five seconds.
                    reports = list(pool.map(self._ask, urls))
                    # First, because a replica that started again at another URL keeps its name.
                    for url in self._last.keys() - urls:
                        self._remove(self._last.pop(url))
                    for url, report in zip(urls, reports, strict=True):
                        self._record(url, report)

    def _remove(self, last: ReplicaEvent) -> None:
        gone = dict.fromkeys(("version", "digest", "error", "quantized"))
        self._log.append(last.model_copy(update={**gone, "t": time.time(), "state": "removed"}))

    def _ask(self, url: str) -> ReplicaReport:
        query = {"after": self._after[url]}
        try:
            headers = spaces.headers(url)
            with self._http.stream("GET", f"{url}/status", params=query, headers=headers) as answer:
                return ReplicaReport.model_validate_json(spaces.read(answer.raise_for_status()))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # perhaps a wrong URL in the list
            name = self._last[url].replica if url in self._last else url
            reason = f"{url} gives no status ({type(error).__name__})"
            gone = ReplicaEvent(
                t=time.time(), replica=name, state="unreachable", version=None, digest=None, error=reason
            )
            return ReplicaReport(status=gone, commits=())

    def _record(self, url: str, report: ReplicaReport) -> None:
        previous = self._last.get(url)
        report = self._told_apart(url, report, previous)
        new = [commit for commit in report.commits if commit.version > self._after[url]]
        for commit in new:
            self._log.append(commit)
        if new and report.traffic:
            # A replica speaks only for itself, whatever it says.
            own = {"source": report.status.replica, "trainer": False, "version": None}
            self._log.append(report.traffic.model_copy(update=own))
        self._after[url] = max(self._after[url], *(commit.version for commit in new), -1)
        now = report.status
        if previous and previous.replica != now.replica:  # before its first answer, its URL is its name
            self._remove(previous)
        self._last[url] = now
        if previous is None or now.model_copy(update={"t": previous.t}) != previous:
            self._log.append(now)

    def _told_apart(self, url: str, report: ReplicaReport, previous: ReplicaEvent | None) -> ReplicaReport:
        name = report.status.replica
        if all(last.replica != name for other, last in self._last.items() if other != url):
            return report
        apart = report.renamed(url)
        if previous is None or previous.replica != apart.status.replica:
            _log.warning(
                "two replicas have the name %r, so %s is recorded as %r: set its REPLICA_NAME or"
                " DELTA_WEIGHT_SYNC_NAME",
                *(name, url, apart.status.replica),
            )
        return apart


class Pokes:
    """Notifies replicas of a new version. Each replica has its own thread here, so no replica delays another.

    Failures are ignored, because a replica that misses a poke finds the version at its next poll.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._guard = Guard("the notification of a replica")
        self._http = spaces.Clients(POKE_TIMEOUT_S)
        self._pools = defaultdict[str, ThreadPoolExecutor](lambda: ThreadPoolExecutor(1, "poke"))
        self._last: dict[str, Future[None]] = {}

    def send(self, _: object = None) -> None:
        """Poke every replica in the background. At most one poke of a replica is queued."""
        with self._guard:
            urls = self._fleet.urls()
            for gone in self._pools.keys() - urls:
                self._pools.pop(gone).shutdown(wait=False)
            for url in urls:
                last = self._last.get(url)
                if last is None or last.running() or last.done():
                    self._last[url] = self._pools[url].submit(self._poke, url)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False)
        wait(self._last.values(), POKE_TIMEOUT_S)
        self._http.close()  # ends the pokes of replicas whose answers do not end

    def _poke(self, url: str) -> None:
        poke = self._http.stream("POST", f"{url}{POKE_PATH}", headers=spaces.headers(url))
        with contextlib.suppress(httpx.HTTPError), poke as answer:
            spaces.read(answer)
