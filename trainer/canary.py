"""Does a replica compute what was published? Logprobs of fixed prompts, its own beside those computed here.

A replica's digest says that its weights have the published bits; a canary asks what it makes of them. That
finds what no digest sees: a label on an engine that computes with something else, an adapter that was never
loaded, keys and values of old weights. Each replica is asked for the logprobs of a few prompts of the task.
Its answer names its version; that one is built here from the bucket, and what is logged is how far the
replica's logprob of any token is from the one in float32.

An engine in bf16 is never as exact (see `LIMIT`), so that a canary finds what is grossly wrong; a single
wrong bit is found by digests.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
from datasets import Dataset
from pydantic import BaseModel, Field
from transformers import AutoTokenizer

from delta_weight_sync import DeltaWeightSyncError, Publisher
from delta_weight_sync.history import RunReader
from delta_weight_sync.kept import kept_checkpoint
from delta_weight_sync.runlog import CanaryEvent, RunLogWriter
from trainer import space_access
from trainer.observer import ReplicaWatch
from trainer.reference import Logprobs, Reference, prompts_of
from trainer.rollouts import MODEL_NAME

LIMIT = 1.0  # nats: above it there is an alarm; three times what bf16 made of SmolLM2-135M
_RESTS = 20  # times as long as a look took: they take a twentieth of the time at most
_TIMEOUT_S, _LEAVE_S = 30.0, 5.0  # of a request; and how long the end waits for a look
_log = logging.getLogger("trainer")
_NOT_NOW = (DeltaWeightSyncError, OSError, httpx.HTTPError, ValueError, KeyError)


class Answer(NamedTuple):
    """What a replica computed, and with which version it says so."""

    version: int
    url: str
    logprobs: Logprobs


class Canary:
    """Looks in the background; training waits for nothing of it."""

    def __init__(
        self,
        urls: Sequence[str],
        prompts: list[list[int]],
        expected: Callable[[int], Logprobs],
        log: RunLogWriter,
        name_of: Callable[[str], str],
        every_s: float,
    ) -> None:
        """`expected`: what a version answers; `name_of`: what the replica at a URL calls itself."""
        self._urls, self._prompts, self._expected = urls, prompts, expected
        self._log, self._name_of, self._every_s = log, name_of, every_s
        self._newest, self._told = -1, ""  # the version that was expected last; the last complaint
        self._http = httpx.Client(timeout=_TIMEOUT_S)
        self._looking, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name="canary", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; a look that takes long is left alone."""
        self._closed.set()
        self._thread.join(_LEAVE_S)
        if not self._thread.is_alive():
            self._http.close()

    def look(self) -> None:
        """Compare every replica once; what cannot be compared now is left to the next look."""
        with self._looking:
            asked = [answer for url in self._urls if (answer := self._answer(url))]
            for answer in sorted(asked):
                if answer.version >= self._newest and not self._closed.is_set():  # back costs an anchor
                    self._compare(answer)

    def _loop(self) -> None:
        wait_s = self._every_s
        while not self._closed.wait(wait_s):
            started = time.monotonic()
            self.look()
            wait_s = max(self._every_s, _RESTS * (time.monotonic() - started))

    def _compare(self, answer: Answer) -> None:
        try:
            found = self._difference(answer)
            if found > LIMIT:  # a commit in the middle of a prompt looks like this, too: once
                answer = ask(self._http, answer.url, self._prompts)
                found = self._difference(answer)
        except _NOT_NOW as error:
            self._complain(f"canary: a replica could not be compared: {error}")
            return
        self._report(answer, found)

    def _complain(self, words: str) -> None:
        if words != self._told:
            _log.warning(words)
        self._told = words

    def _difference(self, answer: Answer) -> float:
        expected = self._expected(answer.version)
        self._newest = max(self._newest, answer.version)
        pairs = zip(expected, answer.logprobs, strict=True)
        return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))

    def _report(self, answer: Answer, found: float) -> None:
        name, version = self._name_of(answer.url), answer.version
        self._log.append(
            CanaryEvent(t=time.time(), replica=name, version=version, difference=found, limit=LIMIT)
        )
        if found > LIMIT:
            _log.warning(
                f"canary: {name} says that it serves version {version}, but its logprobs are off by"
                f" {found:.2g}: heal it, or start it anew"
            )

    def _answer(self, url: str) -> Answer | None:
        """None where it cannot be had now; whether a replica is there at all is what `ReplicaWatch` says."""
        with contextlib.suppress(*_NOT_NOW):
            return ask(self._http, url, self._prompts)
        return None


class _Tokens(BaseModel):
    token_logprobs: list[Annotated[float, Field(allow_inf_nan=False)] | None]


class _Choice(BaseModel):
    index: int
    logprobs: _Tokens


class _Completion(BaseModel):
    choices: list[_Choice]


def ask(http: httpx.Client, url: str, prompts: list[list[int]]) -> Answer:
    """The logprobs of `prompts` at a replica, each of its tokens but the first.

    Raises `httpx.HTTPError` where there is no answer, and `ValueError` or `KeyError` for one without
    logprobs, of no version, or of several.
    """
    body = {"model": MODEL_NAME, "prompt": prompts, "max_tokens": 1, "temperature": 0}
    answer = http.post(
        f"{url}/v1/completions",
        json=body | {"echo": True, "logprobs": 0},
        headers=space_access.headers(url),
    ).raise_for_status()
    (version,) = set(re.findall(r"(\w+):\d+-\d+", answer.headers["x-policy-versions"]))
    choices = sorted(_Completion.model_validate_json(answer.content).choices, key=lambda choice: choice.index)
    return Answer(int(version), url, [_of_prompt(c, len(p)) for c, p in zip(choices, prompts, strict=True)])


def _of_prompt(choice: _Choice, tokens: int) -> list[float]:
    found = [value for value in choice.logprobs.token_logprobs[1:tokens] if value is not None]
    if len(found) != tokens - 1:
        raise ValueError(f"{len(found)} logprobs came for a prompt of {tokens} tokens")
    return found


@contextlib.contextmanager
def beside(
    publisher: Publisher, watch: ReplicaWatch | None, base: str, dataset: Dataset, every_s: float
) -> Iterator[Canary | None]:
    """A canary for a trainer's replicas while it trains; None where it has none, or `every_s` is 0."""
    if not (publisher.run and publisher.log and watch and watch.urls and every_s):
        yield None
        return
    reader = RunReader(publisher.run.bucket, publisher.run.keys.run)
    prompts = prompts_of(dataset, AutoTokenizer.from_pretrained(base))
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        kept_checkpoint(reader, Path(folder)) as kept,
    ):
        reference = Reference(base, reader, kept, prompts)
        canary = Canary(watch.urls, prompts, reference.logprobs, publisher.log, watch.name_of, every_s)
        with contextlib.closing(canary):
            yield canary
