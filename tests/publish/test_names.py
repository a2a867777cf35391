"""Versions have the names of the checkpoint, whatever the trainer calls its parameters and stacks.

`from_pretrained` of a followed version must give the trainer's tensors, bit for bit.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from delta_weight_sync import CheckpointError, Publisher, follow
from delta_weight_sync.checkpoint import Checkpoint
from tests import forked
from tests.support import models
from tests.support.models import build, loads_as, save, train

WEIGHTS = "model.safetensors"
MTP = "mtp.layers.0.self_attn.q_proj.weight"


def trained(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What TRL sends: the parameters that are not frozen."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def versions(model: Any, base: Path, weights: Any = trained, url: str = "") -> Path:
    """Publish the model, train it, publish it again, and follow the run. Returns the version's folder."""
    url = url or f"{(base.parent / 'bucket').as_uri()}#run"
    with Publisher(url, base=base) as publisher:
        publisher.publish(weights(model))
        train(model, 2)
        publisher.publish(weights(model))
    return newest(url, base.parent / "followed")


def newest(url: str, folder: Path) -> Path:
    (version,) = follow(url, into=folder, once=True)
    return version.path


def edit(folder: Path, **tensors: torch.Tensor) -> None:
    """Add tensors to a checkpoint of one file."""
    save_file(load_file(folder / WEIGHTS) | tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("name", models.CONFIGS)
@pytest.mark.parametrize("weights", [trained, lambda model: model], ids=["parameters", "model"])
@pytest.mark.full
def test_a_version_has_the_tensors_of_the_checkpoint_and_the_bits_of_the_trainer(name, weights, tmp_path):
    base = save(model := build(name), tmp_path / "base")
    folder = versions(model, base, weights)
    assert loads_as(model, folder) == []
    assert Checkpoint(folder).specs == Checkpoint(base).specs


def test_the_names_that_save_pretrained_gives_are_taken_as_they_are(tmp_path):
    base = save(model := build("mixtral"), tmp_path / "base")

    def exported(model: Any) -> dict[str, torch.Tensor]:
        return load_file(save(model, tmp_path / "exported") / WEIGHTS)

    folder = versions(model, base, exported)
    assert loads_as(model, folder) == []
    assert Checkpoint(folder).specs == Checkpoint(base).specs


def test_stacks_stay_stacks_if_the_checkpoint_has_them(tmp_path):
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path / "base", save_original_format=False)
    folder = versions(model, tmp_path / "base")
    assert loads_as(model, folder) == []
    assert "model.layers.0.mlp.experts.gate_up_proj" in Checkpoint(folder).specs


def test_a_checkpoint_whose_stacks_are_transposed_keeps_them_so(tmp_path):
    base = save(model := build("qwen3_vl_moe"), tmp_path / "base")
    stacks = {n: t for n, t in load_file(base / WEIGHTS).items() if n.endswith("experts.down_proj")}
    edit(base, **{name: stack.transpose(1, 2).contiguous() for name, stack in stacks.items()})
    model = type(model).from_pretrained(base, dtype=torch.bfloat16)
    folder = versions(model, base)
    assert loads_as(model, folder) == []
    assert Checkpoint(folder).specs == Checkpoint(base).specs


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "qwen2_5_vl"])
def test_what_is_frozen_or_unknown_to_the_model_comes_from_the_base(name, tmp_path):
    base = save(model := build(name), tmp_path / "base")
    edit(base, **{MTP: torch.randn(64, 64).bfloat16()})
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 > 0)
    folder = versions(model, base)
    assert loads_as(model, folder) == []
    assert torch.equal(load_file(folder / WEIGHTS)[MTP], load_file(base / WEIGHTS)[MTP])


def test_masters_in_float32_are_rounded_to_what_the_checkpoint_has(tmp_path):
    base = save(model := build("deepseek_v3"), tmp_path / "base")
    masters = type(model).from_pretrained(base, dtype=torch.float32)
    folder = versions(masters, base, lambda model: model)
    assert Checkpoint(folder).specs == Checkpoint(base).specs
    rounded = type(model).from_pretrained(base, dtype=torch.bfloat16)
    for name, tensor in rounded.state_dict().items():
        tensor.copy_(masters.state_dict()[name])
    assert loads_as(rounded, folder) == []


def test_the_text_model_alone_of_a_checkpoint_that_sees_is_published_into_it(tmp_path):
    base = save(build("qwen3_5_vl"), tmp_path / "base")
    text = transformers.Qwen3_5ForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    folder = versions(text, base)
    assert loads_as(text, folder) == []
    assert Checkpoint(folder).specs == Checkpoint(base).specs
    seeing = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    mine = dict(text.named_parameters())
    whole = dict(seeing.model.language_model.named_parameters())
    assert all(torch.equal(mine[f"model.{name}"], parameter) for name, parameter in whole.items())


def test_a_trainer_goes_on_with_a_run_of_stacks_without_a_base(tmp_path):
    url = f"{(tmp_path / 'bucket').as_uri()}#run"
    base = save(model := build("mixtral"), tmp_path / "base")
    versions(model, base, url=url)
    with Publisher(url) as resumed:
        resumed.publish(model.named_parameters())
        assert resumed.flush().changed == 0, "the run has these weights"
        train(model, 1)
        resumed.publish(model.named_parameters())
        assert resumed.digest(model.named_parameters()) == resumed.flush().digest
    assert loads_as(model, newest(url, tmp_path / "followed")) == []


def test_a_state_of_stacks_is_restored(tmp_path):
    url = f"{(tmp_path / 'bucket').as_uri()}#run"
    base = save(build("qwen3_moe"), tmp_path / "base")
    model = build("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Publisher(url, base=base) as publisher:
        publisher.publish(model.named_parameters())
        train(model, 1)
        publisher.publish(model.named_parameters())
        publisher.save_state(model.named_parameters(), optimizer)
    other = build("qwen3_moe", seed=1)
    with Publisher(url) as resumed:
        resumed.restore(other.named_parameters(), torch.optim.AdamW(other.parameters(), lr=1e-3))
        resumed.publish(other.named_parameters())
        assert resumed.flush().changed == 0
    assert loads_as(other, newest(url, tmp_path / "followed")) == []


def test_a_part_of_a_joined_tensor_alone_is_refused(tmp_path):
    base = save(model := build("hrm_text"), tmp_path / "base")
    left_out = "model.H_module.layers.0.mlp.up_proj.weight"

    def without(model: Any) -> list[tuple[str, torch.Tensor]]:
        return [(name, p) for name, p in model.named_parameters() if name != left_out]

    with pytest.raises(CheckpointError, match=rf"gate_proj\.weight was published, but not {left_out}"):
        versions(model, base, without)


def test_a_prefix_of_all_names_is_named(tmp_path):
    base = save(model := build("mixtral"), tmp_path / "base")

    def wrapped(model: Any) -> list[tuple[str, torch.Tensor]]:
        return [(f"actor.base.{name}", p) for name, p in model.named_parameters()]

    sentence = r"all names that were published begin with 'actor\.base\.', which those of base do not: "
    with pytest.raises(CheckpointError, match=sentence + r".*`name\.removeprefix\('actor\.base\.'\)`"):
        versions(model, base, wrapped)
    for path in base.glob("*.safetensors"):  # also without weights, which give the names otherwise
        path.unlink()
    with pytest.raises(CheckpointError, match=sentence):
        versions(model, base, wrapped)


def test_names_that_neither_model_nor_checkpoint_knows_are_refused(tmp_path):
    base = save(model := build("mixtral"), tmp_path / "base")

    def with_a_head(model: Any) -> list[tuple[str, torch.Tensor]]:
        named = [(f"policy.{name}", p) for name, p in model.named_parameters()]
        return [*named, ("value.weight", torch.zeros(1, 2))]

    with pytest.raises(CheckpointError, match=r"policy\.\S+ is not in base, and \S+ was not published"):
        versions(model, base, with_a_head)


def tied(model: Any) -> Any:
    """A model whose head is the embedding, though its checkpoint has both."""
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _sharded(rank: int, folder: Path, name: str, dim: int) -> None:
    """Publish a model with FSDP2, and write each rank's view of the whole tensors."""
    model = tied(build(name)) if name == "llama" else build(name)
    width = dist.get_world_size()
    others = [p for p in model.parameters() if p.dim() < 2 or p.shape[dim] % width]
    fully_shard(model, shard_placement_fn=lambda p: Shard(0 if p in set(others) else min(dim, p.dim() - 1)))
    with Publisher(f"{(folder / 'bucket').as_uri()}#run", folder / "base") as publisher:
        for number in range(3):
            publisher.publish(model, number)
            assert publisher.digest(model) == publisher.flush().digest
            generator = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                change = 0.05 * torch.randn(parameter.shape, generator=generator)
                whole = DTensor.from_local(change.to(parameter.dtype), parameter.device_mesh)
                with torch.no_grad():
                    parameter.add_(whole.redistribute(placements=parameter.placements))
        publisher.publish(model, 3)
    whole = {n: p.full_tensor().contiguous() for n, p in model.named_parameters()}
    if rank == 0:
        save_file(whole, folder / "trainer.safetensors")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "size", "dim"),
    [
        ("mixtral", 2, 0),
        pytest.param("llama", 2, 0, marks=pytest.mark.long),
        pytest.param("deepseek_v3", 3, 0, marks=pytest.mark.long),
        pytest.param("qwen3_moe", 2, 1, marks=pytest.mark.long),
    ],
)
def test_ranks_with_shards_of_stacks_publish_the_parts(name, size, dim, tmp_path):
    """Sharded by experts, evenly or not, or across the experts; or of a model whose trainer ties the head."""
    base = save(model := build(name), tmp_path / "base")
    assert forked.ranks(_sharded, size, tmp_path, name, dim) == [0] * size
    model = tied(model) if name == "llama" else model
    with torch.no_grad(), contextlib.suppress(KeyError):
        for tensor_name, tensor in load_file(tmp_path / "trainer.safetensors").items():
            model.get_parameter(tensor_name).copy_(tensor)
    folder = newest(f"{(tmp_path / 'bucket').as_uri()}#run", tmp_path / "followed")
    assert loads_as(model, folder) == []
    assert Checkpoint(folder).specs == Checkpoint(base).specs


def test_a_resized_stack_is_refused_before_anything_is_read(tmp_path):
    base = save(model := build("mixtral"), tmp_path / "base")
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    weights = [(n, p[:3] if n == stack else p) for n, p in model.named_parameters()]
    with pytest.raises(CheckpointError, match=rf"{stack} has shape \(3, .*give as base"):
        versions(model, base, lambda _: weights)
