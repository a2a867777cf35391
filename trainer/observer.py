"""What the trainer box adds to the run's log: TRL's metrics, and what the replicas say of themselves."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
from pydantic import ValidationError
from transformers import TrainerCallback

from delta_weight_sync.refs import LARGEST
from delta_weight_sync.runlog import METRICS, ReplicaEvent, ReplicaReport, Rollout, RunLogWriter, StepEvent
from trainer import space_access

_POLL_S = 1.0
_LONGEST, _BLOCK = 1 << 20, 1 << 16  # bytes of a replica's answer, and of a part of it


class SeenRollouts:
    """TRL's queue of samples, with an eye on what the trainer takes from it: the newest group, and the rates.

    Put it in the queue's place: `trainer.rollout_queue = recorder.watch(trainer.rollout_queue)`.
    """

    def __init__(self, samples: Any) -> None:
        self._samples = samples
        self._group: list[Any] = []
        self._whole: list[Any] = []
        self._games = self._solved = self._guesses = self._invalid = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

    def get(self, *args: Any, **options: Any) -> Any:
        """The next sample, as the queue gives it."""
        sample = self._samples.get(*args, **options)
        if self._group and self._group[0].group_id != sample.group_id:
            self._whole, self._group = self._group, []
        self._group.append(sample)
        answers = [answer for _, answer in _turns(sample.completion)]
        guesses = [match for answer in answers if (match := _GUESS.match(answer))]
        wrong = sum("not a word" in answer for answer in answers)
        if guesses or wrong:
            self._games += 1
            self._solved += any(set(guess[0][2::3]) == {"+"} for guess in guesses)
            self._guesses += len(guesses) + wrong
            self._invalid += wrong
        return sample

    def rates(self) -> dict[str, float]:
        """Shares of solved games and of invalid guesses since the last call; empty if nothing was played."""
        if not self._games:
            return {}
        rates = {
            "games/solve_rate": self._solved / self._games,
            "games/invalid_rate": self._invalid / self._guesses,
        }
        self._games = self._solved = self._guesses = self._invalid = 0
        return rates

    def group(self) -> tuple[str, tuple[Rollout, ...]]:
        """Prompt and rollouts of the newest whole group, once; empty if there is no new one."""
        group, self._whole = self._whole[:_GROUP], []
        if not group:
            return "", ()
        return _text(group[0].prompt[-1]), tuple(map(_rollout, group))


_GUESS = re.compile(r"(?:[a-z]\d[+?-])+")
_GROUP, _TURNS, _CHARACTERS, _GROUP_EVERY_S = 16, 16, 600, 5.0  # so that an event fits into a line
_RATES = 2  # that `SeenRollouts.rates` adds


def _rollout(sample: Any) -> Rollout:
    turns = _turns(sample.completion)[:_TURNS]
    return Rollout(turns=turns, reward=_reward(sample), sync=sample.model_version)


def _turns(completion: Sequence[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """What the policy wrote and what came back, turn by turn."""
    turns: list[tuple[str, str]] = []
    for message in completion:
        if message["role"] == "assistant":
            turns.append((_text(message), ""))
        elif turns:
            turns[-1] = (turns[-1][0], (turns[-1][1] + _text(message))[:_CHARACTERS])
    return tuple(turns)


def _text(message: dict[str, Any]) -> str:
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    words = [" ".join(map(str, call.values())) if isinstance(call, dict) else str(call) for call in calls]
    return " ".join(filter(None, [str(message.get("content") or ""), *words]))[:_CHARACTERS]


def _reward(sample: Any) -> float | None:
    reward = sample.metrics.get("reward")
    return float(reward) if _is_number(reward) else None


class StepRecorder(TrainerCallback):
    """Copies each of TRL's log lines into the run's log, and now and then a group of rollouts."""

    def __init__(self, log: RunLogWriter) -> None:
        self._log = log
        self._seen: SeenRollouts | None = None
        self._group_due = 0.0

    def watch(self, samples: Any) -> SeenRollouts:
        """From now on also record what is taken from this queue of samples."""
        self._seen = SeenRollouts(samples)
        return self._seen

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """One event per logged step that has a reward."""
        found = ((key, float(value)) for key, value in (logs or {}).items() if _is_number(value))
        numbers = dict(itertools.islice(found, METRICS - _RATES))
        if "reward" not in numbers:
            return
        prompt, rollouts = "", tuple[Rollout, ...]()
        if self._seen:
            numbers |= self._seen.rates()
            if time.monotonic() >= self._group_due:
                prompt, rollouts = self._seen.group()
                self._group_due = time.monotonic() + _GROUP_EVERY_S
        self._log.append(
            StepEvent(
                t=time.time(),
                step=state.global_step,
                reward=numbers["reward"],
                metrics=numbers,
                prompt=prompt,
                rollouts=rollouts,
            )
        )


def _is_number(value: Any) -> bool:
    """Whether a log can hold it: not infinite, no NaN, nor larger than anything that is measured."""
    return isinstance(value, int | float) and -LARGEST <= value <= LARGEST


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

    @property
    def urls(self) -> list[str]:
        """Of all replicas."""
        return [*self._after]

    def name_of(self, url: str) -> str:
        """What the replica there calls itself; before its first answer its URL."""
        known = self._last.get(url)
        return known.replica if known else url

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
            after = {"after": self._after[url]}
            return ReplicaReport.model_validate_json(self._get(f"{url}/status", after, url))
        except (httpx.HTTPError, ValidationError) as error:
            name = self.name_of(url)
            reason = f"{url} does not answer ({type(error).__name__})"
            gone = ReplicaEvent(
                t=time.time(), replica=name, state="unreachable", version=None, digest=None, error=reason
            )
            return ReplicaReport(status=gone, commits=())

    def _get(self, status: str, after: dict[str, int], url: str) -> bytes:
        """The answer, or so much of it that it is none."""
        with self._http.stream("GET", status, params=after, headers=space_access.headers(url)) as answer:
            body = b""
            for part in answer.raise_for_status().iter_bytes(_BLOCK):
                body += part
                if len(body) > _LONGEST:
                    return b""
            return body

    def _note(self, url: str, report: ReplicaReport) -> None:
        asked = self._after[url]
        for commit in report.commits:
            if commit.version > asked:
                self._log.append(commit)
                self._after[url] = max(self._after[url], commit.version)
        previous, now = self._last.get(url), report.status
        self._last[url] = now
        if previous is None or now.model_copy(update={"t": previous.t}) != previous:
            self._log.append(now)
