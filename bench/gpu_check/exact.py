"""Compares each part of a sync on a device with the host's own code, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bench.competitors import Tensors
from bench.gpu_check.model import Replica
from bench.gpu_check.report import Row, Rows
from bench.model import find, memory_of, whole_parts
from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.codec import diff
from delta_weight_sync.digest import state_digest
from delta_weight_sync.publish.mirror import Mirror
from delta_weight_sync.vllm.memory import Changes
from delta_weight_sync.vllm.worker import Ranks, commit

_EVERY = np.arange(1 << 16, dtype=np.uint16)


def rows(device: torch.device) -> Rows:
    """One row for each check."""
    checks: dict[str, Callable[[torch.device], bool]] = {
        "a replica: every bit pattern, moved by two distances, is hashed, committed and undone": _replica,
        "a trainer: every bit pattern as old and as new value, in bf16 and float32": _trainer,
        "a trainer: many tensors of odd sizes and several dtypes": _many,
    }
    if device.type == "cuda":
        checks["a replica: a tensor of more than 2^31 elements"] = _huge
        checks["a replica: a captured graph computes with committed weights"] = _captured
    for text, check in checks.items():
        try:
            yield Row(text, right=check(device))
        except Exception as error:  # noqa: BLE001 - any error is a result of this check
            yield Row(text, f"{type(error).__name__}: {error}", right=False)


def _replica(device: torch.device) -> bool:
    return all(_committed(device, np.roll(_EVERY, distance) - _EVERY) for distance in (1, 32768))


def _committed(device: torch.device, ulps: np.ndarray) -> bool:
    """Check all patterns in one commit; `ulps` says how far each moves."""
    bits = torch.from_numpy(_EVERY.view(np.int16).copy()).to(device)
    _, memory = memory_of({"w": bits.view(torch.bfloat16)})
    element = np.flatnonzero(ulps).astype(np.int32)
    counts = np.array([0]), np.array([element.size])
    write, moved = memory.prepare(Changes(*counts, element, ulps[element]))
    before = state_digest({"w": _EVERY})
    after = state_digest({"w": _EVERY + ulps})
    right = memory.digest() % (1 << 64) == before and (before + moved) % (1 << 64) == after
    commit([write], Ranks(1))
    right &= bool((_host(bits) == _EVERY + ulps).all()) and memory.digest() % (1 << 64) == after
    write.undo()
    return right and bool((_host(bits) == _EVERY).all())


def _trainer(device: torch.device) -> bool:
    return all(_handed_over(device, dtype) for dtype in (torch.bfloat16, torch.float32))


def _handed_over(device: torch.device, dtype: torch.dtype) -> bool:
    old, new = (torch.from_numpy(bits.view(np.int16).copy()) for bits in (_EVERY, np.roll(_EVERY, 1)))
    return _follows(*({"w": bits.view(torch.bfloat16).to(dtype)} for bits in (old, new)), device)


def _many(device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    old = {}
    new = {}
    dtypes = torch.bfloat16, torch.float32, torch.float16, torch.float64
    for number in range(400):
        values = torch.randn(37 * number, generator=generator)
        later = torch.where(torch.rand(values.shape, generator=generator) < 0.1, values * 1.1, values)
        old[f"w{number}"], new[f"w{number}"] = (each.to(dtypes[number % 4]) for each in (values, later))
    return _follows(old, new, device)


def _follows(old: Tensors, new: Tensors, device: torch.device) -> bool:
    """Hand over `old`, then `new`; both are on the host, whose own casts say what is right."""
    mirror = Mirror("device")
    expected = {name: to_bits(tensor) for name, tensor in new.items()}
    for name, tensor in old.items():
        mirror.add(name, tensor.to(device))
    found = find(mirror, whole_parts((name, tensor.to(device)) for name, tensor in new.items()))
    mirror.keep(found)
    patches = {patch.name: patch for patch in found.patches}
    right = mirror.digest % (1 << 64) == state_digest(expected)
    for name, bits in expected.items():
        by_host = diff(name, to_bits(old[name]), bits)
        ours = patches.get(name, by_host if not by_host.index.size else None)
        right &= ours is not None and np.array_equal(ours.index, by_host.index)
        right &= ours is not None and np.array_equal(ours.ulps, by_host.ulps)
        right &= np.array_equal(mirror.bits(name), bits)
    return right


def _huge(device: torch.device) -> bool:
    replica = Replica({"w": ((1 << 31) + 5,)}, device)
    write, moved = replica.memory.prepare(replica.changes())
    before = replica.memory.digest()
    commit([write], Ranks(1))
    after = replica.memory.digest()
    right = (before + moved - after) % (1 << 64) == 0
    return right and state_digest({"w": _host(replica.flat)}) == after % (1 << 64)


def _captured(device: torch.device) -> bool:
    """vLLM replays graphs that were captured before the commit, so weights must keep their addresses."""
    weight = torch.randn(1024, 1024, device=device).bfloat16()
    given, out = (torch.randn(64, 1024, device=device).bfloat16() for _ in range(2))
    _, memory = memory_of({"w": weight})
    element = np.arange(3, weight.numel(), 10, dtype=np.int32)
    counts = np.array([0]), np.array([element.size])
    write, _ = memory.prepare(Changes(*counts, element, np.full(element.size, 200, np.uint16)))
    torch.mm(given, weight.T, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(given, weight.T, out=out)
    graph.replay()
    before = out.clone()
    commit([write], Ranks(1))
    graph.replay()
    return torch.equal(out, torch.mm(given, weight.T)) and not torch.equal(out, before)


def _host(bits: torch.Tensor) -> np.ndarray:
    return bits.cpu().numpy().view(np.uint16)
