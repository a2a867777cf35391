"""TRL's own trainer publishes through a bucket, without a line of ours in it."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer, async_rollout_worker
from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

from delta_weight_sync import BucketWeightTransfer, follow
from delta_weight_sync.checkpoint import read_bits, to_bits
from delta_weight_sync.reader import open_run
from delta_weight_sync.trl import hooks
from tests.support import tiny_policy as tiny
from tests.support.recorded import BATCH, Recorded, cpu_config

STEPS = 3
PATCHED = ((async_rollout_worker, "is_vllm_available"), (async_rollout_worker.AsyncRolloutWorker, "start"))
if hooks.ADAPTERS.works():
    PATCHED += ((AsyncGRPOTrainer, "_sync_weight_merged"), (AsyncGRPOTrainer, "_streaming_iter"))
if hooks.ATTENTION.works():
    from trl.experimental.async_grpo import packing

    PATCHED += ((packing, "_flash_attn"), (async_grpo_trainer, "get_peak_flops_per_device"))


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each test, TRL is as it was."""
    for module, name in PATCHED:
        monkeypatch.setattr(module, name, getattr(module, name))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny.build(tmp_path / "base", tie=True, seed=0)
    return tmp_path / "base"


def test_it_has_what_trl_asks_for():
    wanted = dict(inspect.getmembers(WeightTransferProtocol, inspect.isfunction))
    for name in {name for name in wanted if not name.startswith("_")}:
        ours = inspect.signature(getattr(BucketWeightTransfer, name))
        assert list(ours.parameters) == list(inspect.signature(wanted[name]).parameters), name


def test_nothing_is_opened_before_training_begins(tmp_path):
    """TRL's script makes one on every rank, and keeps that of the main one. Only what it needs is patched."""
    transfer = BucketWeightTransfer((tmp_path / "bucket").as_uri(), "no such model")
    transfer.pause()
    transfer.resume()
    transfer.destroy()
    assert not (tmp_path / "bucket").exists()
    assert all(getattr(*place).__module__.startswith("delta_weight_sync.trl.") for place in PATCHED)


def test_it_ends_with_all_published_and_can_begin_again(base, tmp_path):
    url = (tmp_path / "bucket").as_uri()
    weights = {n: torch.from_numpy(b).view(torch.bfloat16).float() for n, b in read_bits(base)}
    transfer = BucketWeightTransfer(url, base)
    transfer.init_weight_transfer()
    transfer.send_weights(iter(weights.items()))
    for _ in range(2):  # the second time as of another `train()`, for which TRL sets nothing up
        weights["model.norm.weight"] *= 2
        transfer.send_weights(iter(weights.items()))
        transfer.destroy()
        state = open_run(url).checkout(open_run(url).manifest(), tmp_path / "out")
        np.testing.assert_array_equal(state["model.norm.weight"], to_bits(weights["model.norm.weight"]))
    assert [m.sync for m in open_run(url).versions()] == [3, 2, 1]


@pytest.mark.live
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trls_trainer_with_a_frozen_part_publishes_whole_checkpoints(base, tmp_path, monkeypatch, dtype):
    """TRL leaves out what is frozen; the base has it. Neither of the two needs a kernel from the Hub."""
    if not hooks.ATTENTION.works():
        pytest.skip("this TRL trains on GPUs only")
    url = f"{(tmp_path / 'bucket').as_uri()}#trl"
    settings = {"dtype": dtype, "per_device_train_batch_size": BATCH, "learning_rate": 1e-3}
    args = cpu_config(tmp_path / "trl", max_steps=STEPS, max_staleness=100, **settings)
    trainer = AsyncGRPOTrainer(
        str(base),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "?"}]]}),
        reward_funcs=[],
        rollout_worker=Recorded(STEPS, None),
        weight_transfer=BucketWeightTransfer(url, base),
    )
    trainer.model.model.embed_tokens.requires_grad_(False)
    trainer.train()
    newest = open_run(url).manifest()
    state = open_run(url).checkout(newest, tmp_path / "out")
    live = {name: to_bits(tensor) for name, tensor in trainer.model.named_parameters()}
    assert newest.sync == STEPS + 1
    assert state.keys() == live.keys()
    for name, bits in live.items():
        np.testing.assert_array_equal(state[name], bits)
    changed = [name for name, bits in read_bits(base) if (state[name] != bits).any()]
    assert changed
    assert "model.embed_tokens.weight" not in changed


@pytest.mark.live
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trls_trainer_with_peft_config_publishes_merged_weights_and_keeps_its_base(
    base, tmp_path, monkeypatch, dtype
):
    """A replica follows to disk. TRL alone would merge into the base, and move its weights in bf16."""
    if not hooks.ATTENTION.works():
        pytest.skip("this TRL trains on GPUs only")
    url = f"{(tmp_path / 'bucket').as_uri()}#trl"
    settings = {"dtype": dtype, "per_device_train_batch_size": BATCH, "learning_rate": 1e-2}
    trainer = AsyncGRPOTrainer(
        str(base),
        args=cpu_config(tmp_path / "trl", max_steps=STEPS, max_staleness=100, **settings),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "?"}]]}),
        reward_funcs=[],
        rollout_worker=Recorded(STEPS, None),
        weight_transfer=BucketWeightTransfer(url, base),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert open_run(url).manifest().sync == STEPS + 1
    (version,) = follow(url, into=tmp_path / "followed", once=True)
    loaded = AutoModelForCausalLM.from_pretrained(version.path, dtype=torch.float64).state_dict()
    assert all(torch.equal(p, frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)
    layers = [(n, m) for n, m in trainer.model.get_base_model().named_modules() if hasattr(m, "lora_A")]
    assert len(layers) == 14
    for name, layer in layers:
        a, b = (each["default"].weight.detach().double() for each in (layer.lora_A, layer.lora_B))
        assert b.abs().max() > 0, "it was trained"
        exact = layer.base_layer.weight.double() + layer.scaling["default"] * (b @ a)
        error = (loaded[f"{name}.weight"] - exact).abs()
        for neighbour in (-1, 1):
            bits = loaded[f"{name}.weight"].bfloat16().view(torch.int16) + neighbour
            assert (error <= (bits.view(torch.bfloat16).double() - exact).abs()).all(), name
    trainer.model.merge_adapter()  # works again
    assert not all(torch.equal(p, frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)
