"""Our patches of TRL do what they replace, and notice when TRL changes under them."""

from types import SimpleNamespace

import pytest
import torch
import trl

from delta_weight_sync.trl import patches, trainer


def test_another_release_of_trl_is_refused(monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.raises(RuntimeError, match=r"found 1\.17\.0; pip install 'trl==1\.16\.\*'"):
        patches.install()


def test_a_missing_place_is_named():
    with pytest.raises(RuntimeError, match=r"no_such_thing is not that of trl 1\.16; pip install"):
        patches._replace(patches, "no_such_thing", None)


def test_frozen_parameters_are_handed_over_under_their_checkpoint_names():
    """Version 0 is a whole checkpoint, so it needs what TRL leaves out; tied weights come once."""
    inner = torch.nn.Linear(2, 2)
    inner.weight.requires_grad_(False)
    model = torch.nn.ModuleDict({"_checkpoint_wrapped_module": inner, "embed": torch.nn.Embedding(3, 2)})
    model["head"] = torch.nn.Linear(2, 3, bias=False)
    model["head"].weight = model["embed"].weight
    named = dict(trainer.named_weights(torch.nn.ModuleDict({"module": model})))
    assert list(named) == ["weight", "bias", "embed.weight"]
    assert named["weight"] is inner.weight


def test_a_trl_that_syncs_in_another_way_is_refused(monkeypatch):
    theirs = patches.async_grpo_trainer.AsyncGRPOTrainer
    monkeypatch.setattr(theirs, "_sync_weight_merged", lambda self, t0: (t0, t0, t0))
    with pytest.raises(RuntimeError, match=r"_sync_weight_merged is not that of trl 1\.16"):
        patches.install()


def test_the_throughput_of_a_cpu_is_unknown_and_that_of_a_gpu_is_trls(monkeypatch):
    place = patches.async_grpo_trainer
    monkeypatch.setattr(patches, "get_peak_flops_per_device", lambda accelerator, dtype: 9.9e14)
    monkeypatch.setattr(patches, "_replace", monkeypatch.setattr)  # all is as it was, after this test
    patches.install()
    known = {
        kind: place.get_peak_flops_per_device(SimpleNamespace(device=torch.device(kind)), "bfloat16")
        for kind in ("cpu", "cuda")
    }
    assert known == {"cpu": None, "cuda": 9.9e14}
