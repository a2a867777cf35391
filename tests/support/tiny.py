"""Tiny random models of many architectures, as Hugging Face checkpoints."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from delta_weight_sync.checkpoint import WEIGHTS, read_bits, write_bits
from delta_weight_sync.codec import Bits
from tests.support.architectures import DENSE, EXPERTS, Architecture
from tests.support.hybrids import SIGHT, STATES

ARCHITECTURES = DENSE | EXPERTS | STATES | SIGHT


def write(config: PretrainedConfig, folder: Path) -> None:
    """`base`, a random checkpoint in bf16, and `patched`, which differs in a fifth of every tensor."""
    torch.manual_seed(0)
    _kind(config).from_config(config).to(torch.bfloat16).save_pretrained(folder / "base")
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


def write_base(architecture: Architecture, folder: Path) -> None:
    """`base`, a random checkpoint in bf16, with the tensors that transformers keeps in float32 in float32.

    No tensor is constant: a norm of ones or a router's bias of zeros would hide mistakes.
    """
    torch.manual_seed(0)
    config = architecture.config()
    model = _kind(config).from_config(config)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and (tensor == tensor.flatten()[0]).all():
            tensor.add_(0.1 * torch.randn(tensor.shape))
    model.save_pretrained(folder / "float32")
    load(folder / "float32").save_pretrained(folder / "base")
    state = load_file(weights := folder / "base" / WEIGHTS)
    for name in state:
        if architecture.transposed and name.endswith(architecture.transposed):
            state[name] = state[name].mT.contiguous()
    if architecture.drafts:
        width = config.get_text_config().hidden_size
        drafts = {"eh_proj.weight": (width, 2 * width), "enorm.weight": (width,)}
        state |= {architecture.drafts + name: torch.randn(shape).bfloat16() for name, shape in drafts.items()}
    save_file(state, weights, metadata={"format": "pt"})


def load(folder: Path) -> Any:
    """The model of a checkpoint in bf16, as a trainer loads it."""
    return _kind(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.bfloat16)


def _kind(config: PretrainedConfig) -> Any:
    kinds = AutoModelForImageTextToText, AutoModelForCausalLM
    return next(kind for kind in kinds if type(config) in kind._model_mapping)


def move(tensor: torch.Tensor, random: torch.Generator) -> None:
    """Make a fifth of the elements, and at least one, a few bf16 steps larger: no NaN comes of it.

    Changes in float32 are no whole steps, and some are too small to change what is rounded to bf16.
    """
    kind, step = (torch.int32, 1 << 16) if tensor.dtype == torch.float32 else (torch.int16, 1)
    words = tensor.detach().view(-1).view(kind)
    chosen = torch.randperm(words.numel(), generator=random)[: max(1, words.numel() // 5)]
    words[chosen] += torch.randint(1, 60 * step, chosen.shape, generator=random).to(kind)
