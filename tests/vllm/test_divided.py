"""Two workers of a tensor-parallel replica decode a delta together."""

import contextlib
import socket
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from delta_weight_sync.codec import groups
from delta_weight_sync.digest import state_digest
from delta_weight_sync.errors import WorkerError
from delta_weight_sync.vllm import worker
from delta_weight_sync.vllm.routes import learn, ownership
from delta_weight_sync.vllm.worker import Fallback, LiveWeights, Ranks
from tests import forked
from tests.support.live_weights import delta, load

SHAPES = {"rows": (6, 5), "columns": (5, 6), "norm": (8,), "first": (5,)}


class Shard(torch.nn.Module):
    """What one of several workers holds: a part of the rows or columns, or the whole tensor, or nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank = rank
        self.size = size
        held = {"rows": (6 // size, 5), "columns": (5, 6 // size), "norm": (8,)}
        for name, shape in (held | ({} if rank else {"first": (5,)})).items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))

    @torch.no_grad()
    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if hasattr(self, name):
                dim = {"rows": 0, "columns": 1}.get(name)
                getattr(self, name).copy_(tensor if dim is None else tensor.chunk(self.size, dim)[self.rank])


def learned_together(model: Shard) -> tuple[LiveWeights, Ranks]:
    together = Ranks(model.size)
    learned = learn(model, SHAPES)
    owned, _ = ownership(SHAPES, together.gather(learned.sources))
    return LiveWeights(learned.routes, owned[model.rank], Fallback(model, {}), together), together


def stage_together(rank: int, folder: Path, hosts: str, shares: list[int]) -> None:
    """What one of the workers does. Each tensor is a group of the delta's two parts."""
    socket.gethostname = lambda: hosts[rank]
    old, new = (dict(np.load(folder / f"{name}.npz")) for name in ("old", "new"))
    models = [load(Shard(rank, len(hosts)), state) for state in (old, new)]
    weights, together = learned_together(models[0])
    decoded = list[str]()
    decode = groups.decode_group

    def noted(group, names, *rest):
        decoded.extend(names)
        return decode(group, names, *rest)

    groups.decode_group = noted
    worker._MANY = 0
    staged = weights.stage(sorted(folder.glob("*.safetensors")), weights.digest())
    worker.commit(staged.steps, together)
    assert staged.digest == weights.digest() == state_digest(new)
    for mine, fresh in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine.view(torch.int16), fresh.view(torch.int16))
    assert [*map(len, together.gather(decoded))] == shares


@pytest.mark.full
@pytest.mark.parametrize(
    ("encoding", "hosts", "shares"),
    [("fast", "aa", [2, 2]), ("small", "aa", [4, 4]), ("fast", "aab", [2, 2, 4])],
    ids=["two workers", "old bits are needed", "another host"],
)
def test_the_workers_of_a_host_divide_the_decoding(tmp_path, monkeypatch, encoding, hosts, shares):
    """Each holds what a fresh load would give it, however the tensors are divided among the workers."""
    rng = np.random.default_rng(0)
    old = {name: rng.integers(0, 65536, shape).astype(np.uint16) for name, shape in SHAPES.items()}
    new = {name: bits + rng.integers(0, 2, bits.shape).astype(np.uint16) for name, bits in old.items()}
    monkeypatch.setattr(groups, "GROUP_ELEMENTS", 1)
    names = [*SHAPES]
    for part in (names[:3], names[3:]):
        delta(tmp_path / f"{part[0]}.safetensors", *({n: s[n] for n in part} for s in (old, new)), encoding)
    for name, state in {"old": old, "new": new}.items():
        np.savez(tmp_path / f"{name}.npz", **state)
    assert forked.ranks(stage_together, len(hosts), tmp_path, hosts, shares) == [0] * len(hosts)


def fail_alone(rank: int, folder: Path) -> None:
    """What one of the workers does. On the first, several kinds of work fail, one after the other."""
    worker._TIMEOUT = timedelta(seconds=20)
    learning = object.__new__(worker.DeltaWorker)  # without a vLLM
    learning._model = Shard(rank, 2)
    weights, learning._ranks = learned_together(learning._model)
    by_deltas = partial(weights.stage, [], 0)
    by_checkpoint = partial(weights.stage_checkpoint, folder)
    for work, place, name in (
        (by_deltas, weights.memory, "known_digest"),
        (by_deltas, weights.memory, "prepare"),
        (by_checkpoint, worker.checkpoint, "map_folder"),
        (partial(learning.learn, SHAPES), worker.routes, "learn"),
        (partial(learning.learn, SHAPES), worker, "Fallback"),
        (partial(learning.learn, SHAPES), worker, "Table"),
    ):
        fails = mock.Mock(side_effect=MemoryError("no memory is left"))
        here = mock.patch.object(place, name, fails) if rank == 0 else contextlib.nullcontext()
        with here, pytest.raises(WorkerError if rank else MemoryError, match="no memory is left"):
            work()


@pytest.mark.full
def test_a_worker_that_fails_lets_no_other_worker_wait(tmp_path):
    assert forked.ranks(fail_alone, 2, tmp_path) == [0, 0]
