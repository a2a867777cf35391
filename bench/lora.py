"""Bytes of one sync of a LoRA run: the merged weights' delta, and that of the adapter itself.

SmolLM2-135M is trained with PEFT and AdamW as a language model, on this project's pages, for ten steps, of
which the last eight count. The adapter is on all linear layers, with alpha twice the rank; it and the base
are in float32. Most models have smaller weights than SmolLM2, so more of them change. Those are simulated: a
layer of normal weights, and steps of 0.6 of the learning rate, each in the direction of the one before with a
probability of 0.87, as measured of Adam. The sizes are scaled to the linear layers of Qwen3-0.6B.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import competitors
from bench.change import Change
from bench.results import ROOT, Results
from bench.shapes import qwen_shapes
from delta_weight_sync import codec
from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.codec import Bits
from delta_weight_sync.publish.adapters import adapted
from trainer.policies import smollm2

RATES = (1e-5, 1e-4)
RANKS = (8, 16, 64)
STEPS = 10
_TOKENS = 96
_SIGMA = 0.02  # of a usual model's weights; SmolLM2's are 0.18
_SHAPE = (2048, 1024)
_SIMULATED = 30  # steps; the second and the last are measured
Tensors = dict[str, Bits]


def run(results: Results) -> dict[str, Any]:
    """Every rate and rank."""
    with tempfile.TemporaryDirectory() as folder:
        base = smollm2.build(Path(folder, "smollm2"))
        rows = [_summed("SmolLM2-135M", lr, rank, trained(base, lr, rank)) for lr in RATES for rank in RANKS]
    rows += [_summed("sigma 0.02", lr, rank, simulated(lr, rank)) for lr in RATES for rank in RANKS]
    return {"rows": rows, "steps": STEPS}


def trained(base: Path, lr: float, rank: int) -> Iterator[tuple[Change, Change, float]]:
    """Yield each step's change of the merged weights and of the adapter, and a factor for their sizes."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    text = "\n".join(page.read_text() for page in sorted(ROOT.glob("docs/*.md")))
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    model = get_peft_model(plain, LoraConfig(**settings))
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(own.values(), lr=lr, weight_decay=0.0)

    def merged() -> Tensors:
        return {name: to_bits(tensor) for name, tensor in adapted(model)}

    def adapter() -> Tensors:
        return {name: to_bits(tensor) for name, tensor in own.items()}

    before = merged(), adapter()
    for step in range(1, STEPS + 1):
        at = step * 7919 % (len(tokens) - _TOKENS)
        batch = tokens[at : at + _TOKENS][None]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after = merged(), adapter()
        if step > 2:  # at first, half of the adapter is zero, and gets no gradient
            yield *(_change(lr, *pair) for pair in zip(before, after, strict=True)), 1.0
        before = after


def simulated(lr: float, rank: int) -> Iterator[tuple[Change, Change, float]]:
    """As `trained`, for one layer. The factor is the number of such layers in Qwen3-0.6B."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = _SHAPE
    base = (_SIGMA * torch.randn(_SHAPE, generator=generator)).bfloat16().double()
    factors = {
        "a": (torch.rand(rank, columns, generator=generator) * 2 - 1) / columns**0.5,  # as PEFT begins
        "b": torch.zeros(rows, rank),
    }
    signs = {name: torch.randn(factor.shape, generator=generator).sign() for name, factor in factors.items()}

    def state() -> tuple[Tensors, Tensors]:
        merged = base + 2.0 * (factors["b"].double() @ factors["a"].double())
        return {"w": to_bits(merged)}, {name: to_bits(factor) for name, factor in factors.items()}

    linear = [
        shape
        for name, shape in qwen_shapes().items()
        if any(f".{t}." in name for t in competitors.ALL_LINEAR)
    ]
    layers = sum(a * b for a, b in linear) / (rows * columns)
    before = state()
    for step in range(1, _SIMULATED + 1):
        for name, factor in factors.items():
            stays = torch.rand(factor.shape, generator=generator) < 0.87
            signs[name] *= torch.where(stays, 1.0, -1.0)
            factor += 0.6 * lr * signs[name]
        after = state()
        if step in (2, _SIMULATED):
            yield *(_change(lr, *pair) for pair in zip(before, after, strict=True)), layers
        before = after


def _change(lr: float, old: Tensors, new: Tensors) -> Change:
    patches = [codec.diff(name, old[name], new[name]) for name in old]
    return Change("", "", lr, old, [patch for patch in patches if patch.index.size])


def _summed(
    model: str, lr: float, rank: int, steps: Iterator[tuple[Change, Change, float]]
) -> dict[str, Any]:
    found = list[dict[str, float]]()
    whole = 0.0
    for merged, own, factor in steps:
        # The adapter of a layer of another shape has another share of its size.
        scale = factor if factor == 1 else _adapter_weights(rank) / own.elements
        whole = 2 * own.elements * scale
        found.append(
            {
                "changed": merged.changed / merged.elements,
                "fast": len(merged.encode("fast")) * factor,
                "small": len(merged.encode("small")) * factor,
                "adapter_changed": own.changed / own.elements,
                "adapter_fast": len(own.encode("fast")) * scale,
                "adapter_small": len(own.encode("small")) * scale,
            }
        )
    ranges = {key: [min(each[key] for each in found), max(each[key] for each in found)] for key in found[0]}
    row = {"model": model, "lr": lr, "rank": rank, "adapter_bytes": round(whole)} | ranges
    print("  " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def _adapter_weights(rank: int) -> int:
    """The number of weights of an adapter of Qwen3-0.6B."""
    return sum(rank * (a + b) for a, b in _linear())


def _linear() -> list[tuple[int, ...]]:
    """The shapes of the linear layers of Qwen3-0.6B."""
    wanted = [f".{target}." for target in competitors.ALL_LINEAR]
    return [shape for name, shape in qwen_shapes().items() if any(part in name for part in wanted)]
