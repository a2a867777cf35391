"""A program for test_images.py: an engine of vLLM that takes images takes a commit.

    python -m tests.live.images <folder>

The folder holds the checkpoints `base` and `next`, and `delta` and `back`, which lead from one to the
other. Prints one line of JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from PIL import Image
from transformers.utils import is_torchvision_available

# vLLM's vision models import torchvision, which its CPU build comes without. Images are processed by PIL.
if not is_torchvision_available():
    for part in (
        "",
        ".transforms",
        ".transforms.functional",
        ".transforms.v2",
        ".transforms.v2.functional",
        ".io",
    ):
        sys.modules[f"torchvision{part}"] = MagicMock()

from tests.live.engine import (
    Engine,
    SamplingParams,
    facts,
    read_bits,
    schedule_ahead,
    state_digest,
    to_hex,
)
from tests.support.tiny_sight import SIDE

IMAGES = [Image.effect_noise((SIDE, SIDE), 50 + 100 * number).convert("RGB") for number in range(3)]
PROMPTS = ["a<image>b", "<image>what is it?", "is <image> it?"]


TEXTS = 37, 33, 15  # tokens before the prompts: each of the first three steps ends in the middle of an image
COMMITS = 7


class SeeingEngine(Engine):
    """It reads 48 tokens in a step. An image has 16, so its cache holds all three."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, enable_chunked_prefill=True, max_num_batched_tokens=48, max_num_seqs=8)

    def begin(self, number: int, tokens: int, before: str = "") -> str:
        """Ask about an image."""
        self._asked += 1
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        prompt = {"prompt": before + PROMPTS[number], "multi_modal_data": {"image": IMAGES[number]}}
        self._llm.llm_engine.add_request(str(self._asked), prompt, sampling)
        return str(self._asked)

    def is_halfway(self) -> bool:
        """Whether a request has read the first part of an image."""
        return any(
            image.mm_position.offset < request.num_computed_tokens < image.mm_position.offset + 16
            for request in self.core.scheduler.requests.values()
            for image in request.mm_features
        )

    def see(self) -> list[Any]:
        """Tokens and logprobs of an answer about each image. Nothing is forgotten but prefixes."""
        self.forget()
        return [facts(self.until(self.begin(number, 8)))["logprobs"] for number in range(len(IMAGES))]


def main(folder: Path) -> None:
    schedule_ahead()
    engine = SeeingEngine(folder / "base")
    digests = [to_hex(state_digest(dict(read_bits(folder / name)))) for name in ("base", "next")]
    found: dict[str, Any] = {"learned": engine.learn(), "before": engine.see()}
    found["kept"] = len(engine.core.scheduler.encoder_cache_manager.cached)
    for number, text in enumerate(TEXTS):
        engine.begin(number, 32, before="x" * text)
    found["halfway"] = 0
    for turn in range(COMMITS):  # to `next` and back
        engine.step()
        found["halfway"] += engine.is_halfway()
        delta = str(folder / ("back" if turn % 2 else "delta"))
        engine.take(digests[(turn + 1) % 2], f"{turn}", deltas=[delta])
    found["beside"] = [len(facts(output)["logprobs"]) for output in engine.drain()]
    found["after"] = engine.see()
    engine.core.shutdown()
    found["fresh"] = SeeingEngine(folder / "next").see()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
