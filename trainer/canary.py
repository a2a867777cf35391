"""Compares what replicas compute with what the published weights compute.

    python -m trainer.canary hf://buckets/me/wordle#first https://me-vllm.hf.space [--every 60]

A replica's digest says that its weights have the published bits. This asks for the logprobs of a few fixed
prompts, and so finds faults that no digest shows: an engine that computes with other weights than it reports,
an adapter that was never loaded, keys and values of old weights. The answer names its version. That version
is built from the bucket, as a replica builds it, and runs the same prompts in float32.

An engine in bf16 is less exact (see `LIMIT`), so this finds gross errors; digests find single wrong bits.
Set SPACES and SPACE_KEY as for a trainer.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from pydantic import AliasPath, BaseModel, Field, FiniteFloat
from transformers import AutoModelForCausalLM, AutoTokenizer

from delta_weight_sync import DeltaWeightSyncError
from delta_weight_sync.checkout import CheckpointFolder
from delta_weight_sync.reader import RunReader, open_run
from delta_weight_sync.vllm import MODEL_NAME
from trainer import spaces
from trainer.samples import made_by
from trainer.spaces import SpacesUnavailableError

LIMIT = 1.0  # nats; an alarm above it. Three times the difference that bf16 makes for SmolLM2-135M
TOKENS = 48  # of a prompt
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Play Wordle. c1-r2?a3+n4-e5- The next guess keeps the third letter.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))",
    "In 1969 two astronauts walked on the Moon while a third stayed in orbit.",
)
_FAILURES = (DeltaWeightSyncError, SpacesUnavailableError, OSError, httpx.HTTPError, ValueError, KeyError)
Logprobs = torch.Tensor  # float32 [prompts, tokens - 1]: of each token but the first


class Answer(NamedTuple):
    """Logprobs that a replica computed, and the version that it reports for them."""

    version: int
    logprobs: Logprobs


class _Choice(BaseModel):
    index: int
    logprobs: list[FiniteFloat | None] = Field(validation_alias=AliasPath("logprobs", "token_logprobs"))


class _Completion(BaseModel):
    choices: list[_Choice]


def ask(url: str, prompts: list[list[int]]) -> Answer:
    """Ask a replica for the logprobs of `prompts`, of each token but the first.

    Raises:
        httpx.HTTPError: The replica does not answer.
        ValueError, KeyError: The answer has no logprobs, no version, or several versions.
    """
    body = {"model": MODEL_NAME, "prompt": prompts, "max_tokens": 1, "temperature": 0}
    body |= {"echo": True, "logprobs": 0}
    answer = spaces.request(url, "POST", "/v1/completions", json=body).raise_for_status()
    entries = made_by(answer.headers)
    if len(entries) != 1:
        raise ValueError(f"the answer comes from {len(entries)} published versions, not from one")
    (entry,) = entries
    choices = sorted(_Completion.model_validate_json(answer.content).choices, key=lambda choice: choice.index)
    found = [choice.logprobs[1:TOKENS] for choice in choices]
    if any(None in row or len(row) != TOKENS - 1 for row in found) or len(found) != len(prompts):
        raise ValueError(f"the replica did not return {TOKENS} logprobs for each of {len(prompts)} prompts")
    return Answer(entry["weights"]["version"], torch.tensor(found))


def token_logprobs(model: Any, prompts: torch.Tensor) -> Logprobs:
    """Logprob of every token but the first, for prompts int64 [n, tokens]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=prompts).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(2, prompts[:, 1:, None])[..., 0]


def compare(reader: RunReader, kept: CheckpointFolder, url: str) -> tuple[int, float]:
    """The version that a replica reports, and the largest difference of a logprob, in nats.

    Raises what `ask` and reading the bucket raise.
    """
    folder = kept.update(reader.manifest())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [(tokenizer(text)["input_ids"] * TOKENS)[:TOKENS] for text in PROMPTS]
    for _ in range(2):  # a commit in the middle of a prompt may cause one difference
        answer = ask(url, prompts)
        folder = kept.update(reader.manifest(answer.version))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found = (token_logprobs(model, torch.tensor(prompts)) - answer.logprobs).abs().max().item()
        if found <= LIMIT:
            break
    return answer.version, found


def main() -> None:
    """Compare each replica; the exit code is 1 if one is off or cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m trainer.canary", description=main.__doc__)
    parser.add_argument("run", help="<bucket>#<run>")
    parser.add_argument("replicas", nargs="+", help="URLs of replicas")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between rounds; 0 for one round")
    options = parser.parse_args()
    try:
        watch(options.run, options.replicas, options.every)
    except DeltaWeightSyncError as error:
        sys.exit(f"canary: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def watch(run: str, replicas: list[str], every_s: float) -> None:
    """Compare the replicas every `every_s` seconds; if that is 0, end after one round with its exit code."""
    reader = open_run(run)
    with tempfile.TemporaryDirectory() as folder, CheckpointFolder(reader, Path(folder)) as kept:
        while True:
            failed = False
            for url in replicas:
                try:
                    version, off = compare(reader, kept, url)
                    verdict = f"logprobs are off by {off:.2g} at version {version}"
                    verdict += ": heal or restart it" if off > LIMIT else ", as bf16 makes it"
                    failed |= off > LIMIT
                except _FAILURES as error:
                    verdict = f"cannot be compared: {error}"
                    failed = True
                print(f"{url}: {verdict}", flush=True)
            if not every_s:
                sys.exit(failed)
            time.sleep(every_s)


if __name__ == "__main__":
    main()
