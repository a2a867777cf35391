"""Several trainer processes publish the bits that a single one publishes, and stop together.

Each rank is a process with known weights and gradients. Layouts: `whole` parameters on each rank; `fsdp`; and
`mesh`, two by two ranks with every kind of placement, and FSDP over tensor parallelism. With `+device` they
are compared as on a GPU. A job is an encoding, or `resume:3:4`, which publishes the same in lives that end
after steps 3 and 4. With `:<rank>:<sync>`, that rank fails there; with `:base`, version 0 is published before
the model is sharded. A job's result is the digest of the live weights, or the error that ended it.
"""

import contextlib
import dataclasses
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from delta_weight_sync import Publisher
from delta_weight_sync.codec import Delta, apply
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import StateError
from delta_weight_sync.publish.mirror import Mirror, Search
from delta_weight_sync.publish.sharding import Shards
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from tests import forked
from tests.gpu.on_host import forced
from tests.support.held import held

STEPS = 4


class Model(torch.nn.Module):
    """Odd sizes, a tied head, a frozen layer, and parameters smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(37, 6)
        self.head = torch.nn.Linear(6, 37, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Linear(7, 5).requires_grad_(False)
        self.norm = torch.nn.Parameter(torch.ones(1, 6))
        self.wide = torch.nn.Parameter(torch.randn(5, 8))
        self.turned = torch.nn.Parameter(torch.randn(9, 5).t())
        self.big = torch.nn.Parameter(torch.randn(301, 77))
        self.rows = torch.nn.ParameterDict({"a": torch.randn(8, 3), "b": torch.randn(16)})


PLACEMENTS = {
    "embed.weight": (Shard(0), Shard(0)),
    "frozen.weight": (Replicate(), Shard(0)),
    "frozen.bias": (Shard(0), Replicate()),
    "norm": (Replicate(), Replicate()),
    "wide": (Shard(1), Shard(0)),
    "big": (Shard(0), Shard(1)),
}


def shard(model: Model, layout: str) -> None:
    """Spread the parameters over the ranks."""
    if layout == "fsdp":
        # FSDP refuses parameters that are not contiguous; each rank then has the whole one.
        columns = set() if model.wide.shape[1] % dist.get_world_size() else {model.wide}  # nor odd columns
        fully_shard(model.rows)
        fully_shard(
            model,
            shard_placement_fn=lambda p: Shard(1) if p in columns else Shard(0),
            ignored_params={model.turned},
        )
    elif layout == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name, placements in PLACEMENTS.items():
            _replace(model, name, distribute_tensor(model.get_parameter(name).data, mesh, placements))
        model.head.weight = model.embed.weight
        for name in ("rows.a", "rows.b"):
            _replace(model, name, distribute_tensor(model.get_parameter(name).data, mesh["tp"], [Shard(0)]))
        fully_shard(model.rows, mesh=mesh["dp"])


def _replace(model: Model, name: str, tensor: DTensor) -> None:
    module, _, leaf = name.rpartition(".")
    old = model.get_parameter(name)
    owner = model.get_submodule(module)
    setattr(owner, leaf, torch.nn.Parameter(tensor, requires_grad=old.requires_grad))


def step(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One optimizer step with gradients that depend on its number only."""
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if parameter.requires_grad:
            parameter.grad = _like(gradient, parameter)
    optimizer.step()


def _like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return gradient
    mesh = parameter.device_mesh
    placements = parameter.placements
    if all(type(p) in (Shard, Replicate) for p in placements):
        return distribute_tensor(gradient, mesh, placements)
    data, tensor = mesh.get_coordinate()  # FSDP over tensor parallelism splits what that has split
    part = gradient.chunk(2)[tensor].chunk(2)[data]
    return DTensor.from_local(part, mesh, placements, shape=gradient.shape, stride=gradient.stride())


def run(layout: str, folder: Path, job: str) -> str:
    """Publish the base and a version per step into `folder`; returns the digest of the live weights."""
    encoding, *fault = job.split(":")
    torch.manual_seed(0)
    model = Model()
    rank = dist.get_rank() if dist.is_initialized() else 0
    failing = int(fault[1]) if len(fault) == 2 and int(fault[0]) == rank else None  # the sync
    with _publisher(folder, encoding=encoding) as publisher:
        if fault == ["base"]:
            publisher.publish_base(model.named_parameters() if _is_main() else [], 1)
        shard(model, layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for number in range(STEPS):
            _send(publisher, model, failing == number)
            publisher.flush()
            step(model, optimizer, number)
        _send(publisher, model, failing == STEPS)
        digest = publisher.digest(model.named_parameters())
        assert publisher.flush().digest == digest
        return digest


def resume(layout: str, folder: Path, *lasts: int, **options: str) -> str:
    """As `run`, by trainers that end after a step each and resume from the newest state, of an even step."""
    for last in lasts:
        torch.manual_seed(last % 3)  # the first life ends after step 3, and others begin with other weights
        model = Model()
        shard(model, layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        with _publisher(folder, state_minutes=0, **options) as publisher:
            digest = _live(publisher, model, optimizer, last)
    return digest


def _live(publisher: Publisher, model: Model, optimizer: torch.optim.Optimizer, last: int) -> str:
    publisher.find_state()
    found = publisher._found
    done = publisher.restore(model.named_parameters(), optimizer)
    if found and dist.is_initialized() and len(found.record.ranks) == dist.get_world_size():
        rank = dist.get_rank()
        savers = {0, rank, rank & 1, rank & 2}  # the first rank of each dimension of a mesh saves its copies
        assert found._files.keys() == savers, "it reads no object that it does not need"
    for number in range(done["step"] if done else 0, last + 1):
        publisher.publish(model.named_parameters(), number + 1 if _is_main() else 1)  # as TRL's ranks count
        publisher.flush()
        if number % 2 == 0:
            publisher.save_state(model.named_parameters(), optimizer, extra={"step": number})
        if number < last:
            step(model, optimizer, number)
    return publisher.digest(model.named_parameters())


def _publisher(folder: Path, **options: Any) -> Publisher:
    (folder / "base").mkdir(parents=True, exist_ok=True)
    (folder / "base" / "config.json").write_text("{}")
    return Publisher(f"{(folder / 'bucket').as_uri()}#run", folder / "base", **options)


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _send(publisher: Publisher, model: Model, fails: bool) -> None:
    """A rank that `fails` does so before its first parameter, while the other ranks continue."""

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    patches = (mock.patch.object(kind, "add", fail) for kind in (Mirror, Search)) if fails else ()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        publisher.publish(model.named_parameters())


def spawn(size: int, layout: str, folder: Path, jobs: list[str]) -> list[list[str]]:
    """Run all ranks; each one's results of the jobs."""
    assert forked.ranks(_rank, size, folder, layout, jobs) == [0] * size
    return [(folder / f"results-{rank}").read_text().splitlines() for rank in range(size)]


def _rank(rank: int, folder: Path, layout: str, jobs: list[str]) -> None:
    layout, _, device = layout.partition("+")
    with contextlib.ExitStack() as stack:
        if device:
            stack.enter_context(forced())
        results = stack.enter_context((folder / f"results-{rank}").open("w"))
        for job in jobs:
            try:
                name, *lasts = job.split(":")
                resumes = name == "resume" and resume(layout, folder / job, *map(int, lasts))
                print(resumes or run(layout, folder / job, job), file=results)
            except Exception as error:  # noqa: BLE001 - the test reads it
                print(f"{type(error).__name__}: {error}", file=results)


def published(folder: Path) -> list[tuple[int, str, dict[str, Any]]]:
    """Number, digest and changes of each version, oldest first."""
    reader = RunReader(open_bucket((folder / "bucket").as_uri()), "run")
    found = list[Any]()
    manifests = [*reader.versions()][::-1]
    scratch = Path(tempfile.mkdtemp(dir=folder))
    state = reader.checkout(manifests[0], scratch)
    assert to_hex(state_digest(state)) == manifests[0].digest
    shapes = {name: bits.shape for name, bits in state.items()}
    for manifest in manifests:
        changes = {}
        for path in reader.fetch_all(manifest.delta, scratch):
            patches = [*Delta(path).patches(shapes, state.__getitem__)]
            assert changes.keys().isdisjoint(patch.name for patch in patches), "one part has a tensor"
            changes |= {p.name: (p.index.tolist(), p.ulps.tolist()) for p in patches}
            for patch in patches:
                apply(patch, state[patch.name])
        found.append((manifest.version, manifest.digest, changes))
    return found


@pytest.mark.full
@pytest.mark.parametrize(("layout", "size"), [("fsdp", 2), pytest.param("mesh", 4, marks=pytest.mark.long)])
def test_sharded_ranks_publish_what_a_single_process_publishes(layout, size, tmp_path):
    """In one life or two: each rank then restores its own shards. The state is older than the newest version,
    which comes once.
    """
    alone = {level: run("whole", tmp_path / "alone" / level, level) for level in ("fast", "small")}
    jobs = {"fast": "fast", "small": "small", "fast:base": "fast", "resume:3:4": "fast"}
    assert spawn(size, layout, tmp_path, [*jobs]) == [[alone[encoding] for encoding in jobs.values()]] * size
    for job, encoding in jobs.items():
        versions = published(tmp_path / job)
        assert [version for version, *_ in versions] == [0, 1, 2, 3, 4]
        assert versions == published(tmp_path / "alone" / encoding)
    states = open_bucket((tmp_path / "resume:3:4" / "bucket").as_uri()).list("runs/run/state/")
    folders = {info.key.removesuffix(".json") for info in states if info.key.endswith(".json")}
    objects = [info.key.rpartition("/")[0] for info in states if not info.key.endswith(".json")]
    assert sorted(objects) == sorted([*folders] * size)
    assert len(folders) == 2
    saved = Counter[str]()
    for path in (tmp_path / "resume:3:4" / "bucket" / max(folders)).iterdir():
        saved.update({name: tensor.numel() for name, tensor in load_file(path).items()})
    whole = {f"weight/{name}": parameter.numel() for name, parameter in Model().named_parameters()}
    assert {name: saved[name] for name in whole} == whole, "of copies, only one is saved"
    assert_restores(tmp_path / "resume:3:4", STEPS - 2)


@pytest.mark.full
@pytest.mark.long
def test_any_number_of_ranks_resumes(tmp_path):
    """One rank, then two, then three, then one. Three divide other dimensions, and some hold no part."""
    resume("whole", tmp_path / "resume:4", 3)
    undisturbed = run("whole", tmp_path / "alone", "fast")
    for size in (2, 3):
        assert spawn(size, "fsdp", tmp_path, ["resume:4"]) == [[undisturbed]] * size
    assert published(tmp_path / "resume:4") == published(tmp_path / "alone")
    assert_restores(tmp_path / "resume:4", STEPS)  # that of the trainer before it, which it did not overwrite


def assert_restores(folder: Path, before: int) -> None:
    """One process restores weights and moments after all steps, bit for bit; if damaged, those `before`."""
    torch.manual_seed(0)
    models = model, restored = Model(), Model()
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=1e-3, foreach=False) for each in models)
    for number in range(STEPS):
        step(model, optimizer, number)
    with _publisher(folder) as publisher:
        assert publisher.restore(restored.named_parameters(), other) == {"step": STEPS}
    expected = model.state_dict() | optimizer.state_dict()
    found = restored.state_dict() | other.state_dict()
    torch.testing.assert_close(expected, found, rtol=0, atol=0)
    damaged = max((folder / "bucket").glob("runs/run/state/*/*"))  # of the newest state, the last rank's
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with _publisher(folder) as publisher:
        assert publisher.restore(restored.named_parameters(), other) == {"step": before}


@pytest.mark.full
def test_a_fault_on_one_rank_stops_all_with_its_sentence(tmp_path):
    """In the base, where ranks gather whole tensors, and later, where they send changes."""
    first, second = spawn(2, "fsdp", tmp_path, ["fast:0:0", "fast:1:0", "fast:0:2", "fast:1:2"])
    own = "MemoryError: no room"
    told = "PeerError: rank {} of the trainer stopped the run: {}"
    assert first == [own, told.format(1, own), own, told.format(1, own)]
    assert second == [told.format(0, own), own, told.format(0, own), own]


def _publish_nan(rank: int, folder: Path) -> None:
    model = Model()
    model.big.detach().fill_(torch.nan)
    shard(model, "fsdp")
    with _publisher(folder, allow_nonfinite=True) as publisher:
        publisher.publish(model.named_parameters())
        assert publisher.digest(model.named_parameters()) == publisher.flush().digest


@pytest.mark.full
def test_a_nan_has_the_same_bits_in_a_whole_tensor_as_in_its_blocks(tmp_path):
    """torch's own cast of NaN to bf16 depends on the machine and on the tensor's size."""
    assert forked.ranks(_publish_nan, 2, tmp_path) == [0, 0]


def _save_divided(rank: int, folder: Path, whose: str) -> None:
    """Each rank has its own moments: of its own parameters, or of its part of all parameters."""
    names = "p0", "p1"
    weights = {name: torch.zeros(3, requires_grad=True) for name in names}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.0)
    for name in [names[rank]] if whose == "own" else names:
        weights[name].grad = torch.full((3,), 1.0 + rank)
    optimizer.step()
    with _publisher(folder) as publisher:
        publisher.publish(weights.items())
        with pytest.raises(StateError) as caught:
            publisher.save_state(weights.items(), optimizer)
        assert str(caught.value).startswith("optimizer/0.0/")
        assert "is not the same on rank 1 as on rank 0" in str(caught.value)
        for name in names:
            weights[name].grad = None
            optimizer.state.pop(weights[name], None)
        assert publisher.save_state(weights.items(), optimizer), "what is the same is saved"


@pytest.mark.full
@pytest.mark.parametrize("whose", ["own", "all"])
def test_an_optimizer_that_is_divided_among_ranks_is_not_saved(whose, tmp_path):
    """As ZeRO divides it. A state would give each rank the moments of rank 0."""
    assert forked.ranks(_save_divided, 2, tmp_path, whose) == [0, 0]


def _end_on_another_course(rank: int, folder: Path) -> None:
    weights = {"w": torch.zeros(4), "v": torch.zeros(5)}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    with _publisher(folder) as publisher:
        publisher.publish(weights.items(), 0)
        publisher.save_state(weights.items(), optimizer)
        weights["w"] += 1
        publisher.publish(weights.items(), 10)
        publisher.flush()
    with _publisher(folder) as publisher:
        publisher.restore(weights.items(), optimizer)
        weights["v"] += 2
        publisher.publish(weights.items(), 3)
        assert publisher.flush().digest == publisher.digest(weights.items())


@pytest.mark.full
def test_the_ranks_publish_the_last_sync_of_another_course_together(tmp_path):
    """It is held back before, because the earlier trainer merged its sync 3 into sync 10."""
    assert forked.ranks(_end_on_another_course, 2, tmp_path) == [0, 0]


def test_a_rank_whose_layout_changed_says_so():
    """Its mirror would no longer be that of the elements it sends."""
    shards = Shards("host")
    (whole,) = held([("w", torch.ones(3))])
    shards.begin(whole)
    with pytest.raises(ValueError, match="the sharding of other changed after the first sync"):
        shards.part(dataclasses.replace(whole, name="other"))
