"""Compares what replicas compute with what the published weights compute.

A replica's digest says that its weights have the published bits. A canary asks for the logprobs of a few
fixed prompts, and so finds faults that no digest shows: an engine that computes with other weights than it
reports, an adapter that was never loaded, keys and values of old weights. The answer names its version. The
canary builds that version from the bucket and logs the largest difference to its logprobs in float32.

An engine in bf16 is less exact (see `LIMIT`), so a canary finds gross errors; digests find single wrong bits.
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
from typing import Any, NamedTuple

import httpx
import torch
from datasets import Dataset
from pydantic import AliasPath, BaseModel, Field, FiniteFloat
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from delta_weight_sync import DeltaWeightSyncError, Publisher
from delta_weight_sync.checkout import CheckpointFolder
from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.errors import CheckpointError
from delta_weight_sync.reader import RunReader
from delta_weight_sync.runlog import CanaryEvent, RunLogWriter
from trainer import spaces
from trainer.observe import ReplicaWatch
from trainer.rollouts import MODEL_NAME
from trainer.settings import Settings

LIMIT = 1.0  # nats; an alarm above it. Three times the difference that bf16 makes for SmolLM2-135M
PROMPTS, TOKENS = 4, 48  # number of prompts, and tokens of each
Logprobs = torch.Tensor  # float32 [prompts, tokens - 1]: of each token but the first
_REST = 20  # a comparison is followed by a rest of this many times its duration
_TIMEOUT_S, _JOIN_S = 30.0, 5.0  # of a request; and how long `close` waits for a comparison
_TRANSIENT = (DeltaWeightSyncError, OSError, httpx.HTTPError, ValueError, KeyError)
_log = logging.getLogger("trainer")


def prompts_of(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The first distinct prompts of a task as token ids, each cut or repeated to `TOKENS` tokens."""
    found: dict[tuple[int, ...], None] = {}
    for row in dataset:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        found[tuple((ids * TOKENS)[:TOKENS])] = None
        if len(found) == PROMPTS:
            break
    return [list(ids) for ids in found]


class Reference:
    """Builds versions from the bucket, as a replica does, and computes the logprobs in float32."""

    def __init__(
        self, base: str, reader: RunReader, folder: CheckpointFolder, prompts: list[list[int]]
    ) -> None:
        """`base`: a checkpoint of the run's architecture; its weights are replaced."""
        with torch.random.fork_rng():  # a run with a canary draws the same random numbers as one without
            self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self._reader, self._folder, self._prompts = reader, folder, torch.tensor(prompts)

    @torch.inference_mode()
    def logprobs(self, version: int) -> Logprobs:
        """Logprobs of a version; raises what reading the bucket raises."""
        missing = dict(self._model.named_parameters())
        for name, bits in read_bits(self._folder.update(self._reader.find(version))):
            if name in missing:  # a tied head may be stored twice
                missing.pop(name).copy_(torch.from_numpy(bits).view(torch.bfloat16))
        if missing:
            raise CheckpointError(f"{min(missing)} is not published: this model is not that of the run")
        return token_logprobs(self._model, self._prompts)


def token_logprobs(model: Any, prompts: torch.Tensor) -> Logprobs:
    """Logprob of every token but the first, for prompts int64 [n, tokens]."""
    logits: torch.Tensor = model(input_ids=prompts).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, prompts[:, 1:, None])[..., 0]


class Answer(NamedTuple):
    """Logprobs that a replica computed, and the version that it reports for them."""

    version: int
    url: str
    logprobs: Logprobs


class Canary:
    """Compares replicas in a background thread."""

    def __init__(
        self,
        urls: Sequence[str],
        prompts: list[list[int]],
        expected: Callable[[int], Logprobs],
        log: RunLogWriter,
        name_of: Callable[[str], str],
        every_s: float,
    ) -> None:
        """`expected`: the logprobs of a version; `name_of`: the name of the replica at a URL."""
        self._urls, self._prompts, self._expected = urls, prompts, expected
        self._log, self._name_of, self._every_s = log, name_of, every_s
        self._newest, self._warned = -1, ""  # newest version that was compared, and the last warning
        self._http = httpx.Client(timeout=_TIMEOUT_S)
        self._comparing, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name="canary", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; a comparison that takes long is abandoned."""
        self._closed.set()
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._http.close()

    def compare(self) -> None:
        """Compare every replica once; a failed comparison is left to the next call."""
        with self._comparing:
            answers: list[Answer] = []
            for url in self._urls:
                with contextlib.suppress(*_TRANSIENT):  # `ReplicaWatch` reports replicas that are gone
                    answers.append(ask(self._http, url, self._prompts))
            for answer in sorted(answers, key=lambda answer: answer.version):
                if answer.version >= self._newest and not self._closed.is_set():  # going back costs an anchor
                    self._check(answer)

    def _loop(self) -> None:
        wait_s = self._every_s
        while not self._closed.wait(wait_s):
            started = time.monotonic()
            self.compare()
            wait_s = max(self._every_s, _REST * (time.monotonic() - started))

    def _check(self, answer: Answer) -> None:
        try:
            difference = self._difference(answer)
            if difference > LIMIT:  # a commit in the middle of a prompt may cause this once
                answer = ask(self._http, answer.url, self._prompts)
                difference = self._difference(answer)
        except _TRANSIENT as error:
            warning = f"canary: a replica could not be compared: {error}"
            if warning != self._warned:
                _log.warning(warning)
            self._warned = warning
            return
        name, version = self._name_of(answer.url), answer.version
        self._log.append(
            CanaryEvent(t=time.time(), replica=name, version=version, difference=difference, limit=LIMIT)
        )
        if difference > LIMIT:
            _log.warning(
                f"canary: {name} says that it serves version {version}, but its logprobs are off by"
                f" {difference:.2g}: heal or restart it"
            )

    def _difference(self, answer: Answer) -> float:
        expected = self._expected(answer.version)
        self._newest = max(self._newest, answer.version)
        return (expected - answer.logprobs).abs().max().item()


class _Choice(BaseModel):
    index: int
    logprobs: list[FiniteFloat | None] = Field(validation_alias=AliasPath("logprobs", "token_logprobs"))


class _Completion(BaseModel):
    choices: list[_Choice]


def ask(http: httpx.Client, url: str, prompts: list[list[int]]) -> Answer:
    """Ask a replica for the logprobs of `prompts`, of each token but the first.

    Raises:
        httpx.HTTPError: The replica does not answer.
        ValueError, KeyError: The answer has no logprobs, no version, or several versions.
    """
    body = {"model": MODEL_NAME, "prompt": prompts, "max_tokens": 1, "temperature": 0}
    answer = http.post(
        f"{url}/v1/completions", json=body | {"echo": True, "logprobs": 0}, headers=spaces.headers(url)
    ).raise_for_status()
    (version,) = set(re.findall(r"(\w+):\d+-\d+", answer.headers["x-policy-versions"]))
    choices = sorted(_Completion.model_validate_json(answer.content).choices, key=lambda choice: choice.index)
    found = [choice.logprobs[1:TOKENS] for choice in choices]
    if any(None in row or len(row) != TOKENS - 1 for row in found) or len(found) != len(prompts):
        raise ValueError(f"the replica did not return {TOKENS} logprobs for each of {len(prompts)} prompts")
    return Answer(int(version), url, torch.tensor(found))


@contextlib.contextmanager
def start_canary(
    settings: Settings, publisher: Publisher, watch: ReplicaWatch, dataset: Dataset
) -> Iterator[Canary | None]:
    """Run a canary for the main rank's replicas; None without replicas or if `canary_s` is 0."""
    base, urls, every_s = settings.model, settings.replicas, settings.canary_s
    if not (publisher.log and urls and every_s):
        yield None
        return
    reader, prompts = publisher.reader, prompts_of(dataset, AutoTokenizer.from_pretrained(base))
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        CheckpointFolder(reader, Path(folder)) as checkpoints,
    ):
        expected = Reference(base, reader, checkpoints, prompts).logprobs
        canary = Canary(urls, prompts, expected, publisher.log, watch.name_of, every_s)
        with contextlib.closing(canary):
            yield canary
