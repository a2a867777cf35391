"""Two workers of a tensor-parallel replica decode a delta together."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from delta_weight_sync.codec import groups
from delta_weight_sync.digest import state_digest
from delta_weight_sync.vllm import worker
from delta_weight_sync.vllm.routes import learn, ownership
from delta_weight_sync.vllm.worker import Fallback, LiveWeights, Ranks
from tests import forked
from tests.support.live_weights import delta


class Half(torch.nn.Module):
    """One of two workers: half of the rows or columns of tensors, or all of them, or none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        held = {"rows": (3, 8), "columns": (6, 4), "norm": (8,)}
        for name, shape in (held | ({} if rank else {"first": (5,)})).items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))

    @torch.no_grad()
    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if hasattr(self, name):
                dim = {"rows": 0, "columns": 1}.get(name)
                held = tensor if dim is None else tensor.chunk(2, dim)[self.rank]
                getattr(self, name).copy_(held)


HALVES = {"rows": (6, 8), "columns": (6, 8), "norm": (8,), "first": (5,)}


def stage_together(rank: int, folder: Path, encoding: str) -> None:
    """What one of two workers does. Each tensor is a group of the delta's two parts."""
    old, new = (dict(np.load(folder / f"{name}.npz")) for name in ("old", "new"))
    models = Half(rank), Half(rank)
    for model, state in zip(models, (old, new), strict=True):
        tensors = {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in state.items()}
        model.load_weights(tensors.items())
    together, learned = Ranks(2), learn(models[0], HALVES)
    owned, _ = ownership(HALVES, together.gather(learned.sources))
    weights = LiveWeights(learned.routes, owned[rank], Fallback(models[0], {}), together)
    decoded, decode = list[str](), groups.decode_group

    def noted(group, names, *rest):
        decoded.extend(names)
        return decode(group, names, *rest)

    groups.decode_group, worker._MANY = noted, 0
    staged = weights.stage(sorted(folder.glob("*.safetensors")), weights.digest())
    worker.commit(staged.steps, together.agree)
    assert staged.digest == weights.digest() == state_digest(new)
    for mine, fresh in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine.view(torch.int16), fresh.view(torch.int16))
    everyone = together.gather(decoded)
    assert sorted(chain(*everyone)) == sorted([*HALVES] * (1 if encoding == "fast" else 2))
    assert encoding == "small" or [*map(len, everyone)] == [2, 2]


@pytest.mark.parametrize("encoding", ["fast", "small"])
def test_workers_divide_the_decoding_unless_it_needs_old_bits(tmp_path, monkeypatch, encoding):
    """Each holds what a fresh load would give it, however the tensors are divided among the workers."""
    rng = np.random.default_rng(0)
    old = {name: rng.integers(0, 65536, shape).astype(np.uint16) for name, shape in HALVES.items()}
    new = {name: bits + rng.integers(0, 2, bits.shape).astype(np.uint16) for name, bits in old.items()}
    monkeypatch.setattr(groups, "GROUP_ELEMENTS", 1)
    names = [*HALVES]
    for part in (names[:3], names[3:]):
        delta(tmp_path / f"{part[0]}.safetensors", *({n: s[n] for n in part} for s in (old, new)), encoding)
    for name, state in {"old": old, "new": new}.items():
        np.savez(tmp_path / f"{name}.npz", **state)
    assert forked.ranks(stage_together, 2, tmp_path, encoding) == [0, 0]
