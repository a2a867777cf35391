"""Tiny random models of many architectures, as Hugging Face checkpoints."""

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from bench.architectures import DENSE, EXPERTS
from bench.hybrids import SIGHT, STATES
from delta_weight_sync.checkpoint import WEIGHTS, read_bits, write_bits
from delta_weight_sync.codec import Bits

ARCHITECTURES = DENSE | EXPERTS | STATES | SIGHT


def write(config: PretrainedConfig, folder: Path) -> None:
    """`base`, a random checkpoint, and `patched`, which differs from it in a fifth of every tensor."""
    torch.manual_seed(0)
    kinds = AutoModelForImageTextToText, AutoModelForCausalLM
    kind = next(kind for kind in kinds if type(config) in kind._model_mapping)
    kind.from_config(config).to(torch.bfloat16).save_pretrained(folder / "base")
    shutil.copytree(folder / "base", folder / "patched", ignore=shutil.ignore_patterns("*.safetensors"))
    rng = np.random.default_rng(0)
    patched = {name: _moved(bits, rng) for name, bits in read_bits(folder / "base")}
    shapes = {name: bits.shape for name, bits in patched.items()}
    write_bits(shapes, patched.__getitem__, folder / "patched" / WEIGHTS)


def _moved(bits: Bits, rng: np.random.Generator) -> Bits:
    """A fifth of the elements, and at least one, a few ULPs larger: no NaN comes of it."""
    flat = bits.reshape(-1).copy()
    index = rng.permutation(flat.size)[: max(1, flat.size // 5)]
    flat[index] += rng.integers(1, 60, index.size).astype(np.uint16)
    return flat.reshape(bits.shape)
