"""Our patches of TRL do what they replace, and notice when TRL changes under them."""

import pytest
import torch
import trl

from delta_weight_sync.publish import trl_patches


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
def test_packed_attention_equals_attention_of_each_sequence(heads):
    lengths, head_dim = [3, 1, 6], 8
    q = torch.randn(sum(lengths), heads[0], head_dim)
    k, v = (torch.randn(sum(lengths), heads[1], head_dim) for _ in range(2))
    starts = torch.tensor([0, 3, 4, 10])
    packed = trl_patches._varlen_attention(q, k, v, starts, starts, 6, 6)
    for begin, end in zip([0, 3, 4], [3, 4, 10], strict=True):
        expected = _naive(q[begin:end], k[begin:end], v[begin:end])
        torch.testing.assert_close(packed[begin:end], expected)


def test_a_longer_key_sequence_is_aligned_to_the_end():
    """As FlashAttention: the last query sees every key."""
    q, k, v = torch.randn(2, 1, 4), torch.randn(5, 1, 4), torch.randn(5, 1, 4)
    out = trl_patches._varlen_attention(q, k, v, torch.tensor([0, 2]), torch.tensor([0, 5]), 2, 5)
    scores = (q[1, 0] @ k[:, 0].T / 2.0).softmax(-1)
    torch.testing.assert_close(out[1, 0], scores @ v[:, 0])


def _naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def test_another_release_of_trl_is_refused(monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.raises(RuntimeError, match=r"found 1\.17\.0; pip install 'trl==1\.16\.0'"):
        trl_patches.install()


def test_a_missing_place_is_named():
    with pytest.raises(RuntimeError, match=r"has no delta_weight_sync\.\S+\.no_such_thing any more"):
        trl_patches._replace(trl_patches, "no_such_thing", None)


def test_frozen_parameters_are_handed_over_under_their_checkpoint_names():
    """Version 0 is a whole checkpoint, so it needs what TRL leaves out; tied weights come once."""
    inner = torch.nn.Linear(2, 2)
    inner.weight.requires_grad_(False)
    model = torch.nn.ModuleDict({"_checkpoint_wrapped_module": inner, "embed": torch.nn.Embedding(3, 2)})
    model["head"] = torch.nn.Linear(2, 3, bias=False)
    model["head"].weight = model["embed"].weight
    named = dict(trl_patches.named_weights(torch.nn.ModuleDict({"module": model})))
    assert list(named) == ["weight", "bias", "embed.weight"]
    assert named["weight"] is inner.weight


def test_a_trl_that_syncs_in_another_way_is_refused(monkeypatch):
    theirs = trl_patches.async_grpo_trainer.AsyncGRPOTrainer
    monkeypatch.setattr(theirs, "_sync_weight_merged", lambda self, t0: (t0, t0, t0))
    with pytest.raises(RuntimeError, match="syncs weights in another way"):
        trl_patches.install()
