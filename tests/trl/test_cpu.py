"""What lets TRL train on a CPU does what it replaces.

The attention that takes the place of TRL's kernel is exact on a CPU, and one kernel without a wait on a GPU.
The GPU is pretended: under `FakeTensorMode` a tensor has a device and a shape but no content, so what waits
for a value raises. The kernel itself is not run here; its call is PyTorch's own, with its shapes.
"""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.experimental.async_grpo import packing

from delta_weight_sync.trl import cpu, patches

# the last two go on where another sequence ends
LENGTHS_Q = [3, 1, 6, 2]
LENGTHS_K = [3, 1, 9, 7]
STARTS = [[0, *itertools.accumulate(lengths)] for lengths in (LENGTHS_Q, LENGTHS_K)]
BOUNDS = *(torch.tensor(places, dtype=torch.int32) for places in STARTS), max(LENGTHS_Q), max(LENGTHS_K)
LAYERS = 3
TOKENS = 4096
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS}
CONFIG = Qwen3Config(**HEADS, **SIZES, max_position_embeddings=TOKENS)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's packing with our attention, on a machine that has no package of kernels."""
    monkeypatch.setitem(sys.modules, "kernels", None)  # its import fails
    monkeypatch.setattr(patches, "_replace", monkeypatch.setattr)  # all is as it was, after this test
    patches.install()
    packing.register_tree_attention()


def tensors(heads: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS_Q), heads[0], 8), *[(sum(LENGTHS_K), heads[1], 8)] * 2]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def one_query_at_a_time(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
) -> torch.Tensor:
    """What `varlen_attn` documents, with the causal mask of FlashAttention: aligned to the bottom right."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (max_q, max_k) == (cu_seq_q.diff().max(), cu_seq_k.diff().max())
    assert enable_gqa or query.shape[1] == key.shape[1]
    left, right = window_size
    out = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for s, i, head in itertools.product(range(len(cu_seq_q) - 1), range(max_q), range(query.shape[1])):
        first, last = (int(c[s + 1] - c[s]) for c in (cu_seq_q, cu_seq_k))
        if i < first:
            own = last - first + i
            sees = slice(0 if left < 0 else max(0, own - left), last if right < 0 else own + right + 1)
            keys, values = (t[cu_seq_k[s] : cu_seq_k[s + 1], head // group][sees] for t in (key, value))
            row = cu_seq_q[s] + i
            weights = (keys @ query[row, head] * (scale or query.shape[2] ** -0.5)).softmax(0)
            out[row, head] = weights @ values
    return out


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0)], ids=["all", "window"])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_the_gpus_call_and_the_cpus_path_are_the_same_attention(monkeypatch, heads, window, scale):
    monkeypatch.setattr(cpu, "varlen_attn", one_query_at_a_time)
    arguments = (*tensors(heads), *BOUNDS)
    there = cpu._kernel(*arguments, scale=scale, before=window[0])
    here = cpu.attention(*arguments, softmax_scale=scale, causal=True, window_size=window)
    torch.testing.assert_close(here, there)


def test_gradients_are_those_of_each_sequence_alone():
    q, k, v = (t.requires_grad_() for t in tensors((4, 2)))
    cpu.attention(q, k, v, *BOUNDS).square().sum().backward()
    packed = [t.grad for t in (q, k, v)]
    alone = tuple(t.detach().requires_grad_() for t in (q, k, v))
    expected = one_query_at_a_time(*alone, *BOUNDS, scale=None, window_size=(-1, 0), enable_gqa=True)
    expected.square().sum().backward()
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, theirs.grad)


@pytest.mark.parametrize("left", [0, 1], ids=["aligned to the top left", "with a window that is too long"])
def test_a_kernel_that_sees_other_keys_is_found(monkeypatch, left):
    """It would train, and badly."""

    def another(*arguments, window_size, **options):
        q, k, v, starts_q, starts_k, max_q, max_k = arguments
        if left == 0:
            k, v = (
                torch.cat([t[b : b + n] for b, n in zip(starts_k, starts_q.diff(), strict=False)])
                for t in (k, v)
            )
            starts_k = starts_q
            max_k = max_q
        elif window_size[0] >= 0:
            window_size = (window_size[0] + left, 0)
        return one_query_at_a_time(
            q, k, v, starts_q, starts_k, max_q, max_k, window_size=window_size, **options
        )

    device = torch.device("cpu")
    monkeypatch.setattr(cpu, "varlen_attn", one_query_at_a_time)
    cpu._require_same_mask.__wrapped__(device)
    monkeypatch.setattr(cpu, "varlen_attn", another)
    with pytest.raises(RuntimeError, match=r"pip install torch==2\.13\.0"):
        cpu._require_same_mask.__wrapped__(device)


@pytest.mark.parametrize("wish", [{"softcap": 30.0}, {"causal": False}])
def test_another_kind_of_attention_is_refused(wish):
    with pytest.raises(ValueError, match="train another model"):
        cpu.attention(*tensors((4, 4)), *BOUNDS, **wish)


def packed_arguments() -> dict[str, torch.Tensor | int]:
    """What TRL gives a model for one sample of `TOKENS` tokens."""
    bounds = torch.tensor([0, TOKENS], dtype=torch.int32)
    return {
        "input_ids": torch.zeros(1, TOKENS, dtype=torch.long),
        "position_ids": torch.arange(TOKENS)[None],
        "tree_kv_index": torch.arange(TOKENS),
        "tree_cu_seqlens_q": bounds,
        "tree_cu_seqlens_k": bounds.clone(),
        "tree_max_seqlen_q": TOKENS,
        "tree_max_seqlen_k": TOKENS,
    }


class Recorder(TorchDispatchMode):
    """Every operation, and the size of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.names.append(func.name())
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, torch.Tensor):
                self.largest = max(self.largest, result.numel())
        return results


def policy(dtype: torch.dtype) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM._from_config(CONFIG, attn_implementation=packing.TREE_ATTENTION, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_on_a_gpu_take_the_kernel(monkeypatch, dtype):
    tried = []
    monkeypatch.setattr(cpu, "_require_same_mask", tried.append)
    with FakeTensorMode(), torch.device("cuda"), Recorder() as seen:
        q = torch.empty(8, 4, 16, dtype=dtype)
        k = torch.empty(12, 2, 16, dtype=dtype)
        bounds = (torch.tensor([0, length], dtype=torch.int32) for length in (8, 12))
        out = cpu.attention(q, k, k, *bounds, 8, 12, softmax_scale=0.5, window_size=(3, 0))
        assert not cpu._kernel_takes(q.float()), "which it does not know"
    assert seen.names.count("torch_attn::_varlen_attn") == 1
    assert tried == [q.device]
    assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "cuda")


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
@pytest.mark.usefixtures("installed")
def test_a_step_on_a_gpu_is_a_kernel_per_layer_without_a_wait_or_a_mask(monkeypatch, weights):
    """On pretended tensors of a CPU, for without CUDA PyTorch can neither index nor derive those of a GPU."""
    monkeypatch.setattr(cpu, "_kernel_takes", lambda q: q.dtype == torch.bfloat16)
    monkeypatch.setattr(cpu, "_require_same_mask", lambda device: None)  # it waits, once per process
    casting = torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32)
    with FakeTensorMode(), casting, Recorder() as seen:
        policy(weights)(**packed_arguments()).logits.sum().backward()
    for kernel in ("_varlen_attn", "_varlen_attn_backward"):
        assert seen.names.count(f"torch_attn::{kernel}") == LAYERS
    assert seen.largest < TOKENS * TOKENS / 8


@pytest.mark.usefixtures("installed")
def test_a_step_on_a_cpu_makes_no_mask():
    """In 16 bits too, and although checkpointing runs each layer twice."""
    model = policy(torch.bfloat16).train()
    model.gradient_checkpointing_enable()
    with Recorder() as seen:
        model(**packed_arguments()).logits.sum().backward()
    assert seen.largest < TOKENS * TOKENS / 8


@pytest.mark.usefixtures("installed")
def test_the_throughput_of_a_cpu_is_unknown_and_that_of_a_gpu_is_trls(monkeypatch):
    place = cpu.async_grpo_trainer
    monkeypatch.setattr(cpu, "_PEAK_FLOPS", lambda accelerator, dtype: 9.9e14)
    known = {
        kind: place.get_peak_flops_per_device(SimpleNamespace(device=torch.device(kind)), "bfloat16")
        for kind in ("cpu", "cuda")
    }
    assert known == {"cpu": None, "cuda": 9.9e14}
