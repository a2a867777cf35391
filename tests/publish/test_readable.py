"""Tensors of a trainer that have no plain memory are refused by name, at any publish; no process dies.

A fault here would be a segmentation fault, so one process of its own publishes all of these tensors.
"""

import contextlib
import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from delta_weight_sync import CodecError, DeltaWeightSyncError, Publisher, follow
from delta_weight_sync.reader import open_run
from tests import forked
from tests.support.models import same_bits

SHAPE = (16, 8)
NAME = "layers.1.weight"
VALUES = torch.arange(math.prod(SHAPE)).reshape(SHAPE).sub(64).div(8)  # bf16 holds them exactly


class Computing(torch.Tensor):
    """A subclass that computes by itself, and has no memory."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(VALUES if isinstance(each, cls) else each for each in args), **(kwargs or {}))


class Elsewhere(torch.Tensor):
    """Pretends to be on an accelerator whose addresses are not the host's."""

    device = property(lambda self: torch.device("xpu", 0))  # type: ignore[assignment]


class Plain(torch.Tensor):
    """A subclass with plain memory."""


def freed(tensor: torch.Tensor, share: float = 0.0) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(int(tensor.nbytes * share))
    return tensor


def freed_view(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.cat([tensor, tensor])
    view = whole[len(tensor) :]
    whole.untyped_storage().resize_(tensor.nbytes)
    return view


def having(tensor: torch.Tensor, **attributes: object) -> torch.Tensor:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def of_dtype(name: str) -> torch.Tensor:
    if not hasattr(torch, name):  # a dtype of newer releases
        return torch.empty(SHAPE, device="meta")
    return torch.empty(SHAPE, dtype=getattr(torch, name))


def mesh() -> Any:
    return init_device_mesh("cpu", (1,))


Make = Callable[[torch.Tensor], Any]
# What is made of a tensor, and what the sentence that refuses it says.
REFUSED: dict[str, tuple[Make, str]] = {
    "meta": (lambda w: w.to("meta"), "meta device"),
    "meta_parameter": (lambda w: torch.nn.Parameter(w.to("meta")), "meta device"),
    "uninitialized_parameter": (
        lambda w: torch.nn.UninitializedParameter(),
        "meta device|uninitialized|values",
    ),
    "uninitialized_buffer": (lambda w: torch.nn.UninitializedBuffer(), "meta device|uninitialized|values"),
    "freed_storage": (freed, "memory"),
    "freed_storage_of_a_parameter": (lambda w: torch.nn.Parameter(freed(w)), "memory"),
    "freed_storage_of_bf16": (lambda w: freed(w.bfloat16()), "memory"),
    "freed_storage_of_a_part": (lambda w: freed(w, 0.5), "memory"),
    "freed_storage_of_a_view": (lambda w: freed_view(w), "memory"),
    "partitioned": (lambda w: torch.nn.Parameter(torch.empty(0)), "no elements.*GatheredParameters"),
    "no_rows": (lambda w: torch.empty(0, 8), "no elements"),
    "negative_view": (lambda w: torch.complex(w, w).conj().imag, "lazy|negative"),
    "conjugate_view": (lambda w: torch.complex(w, w).conj(), "complex"),
    "complex": (lambda w: torch.complex(w, w), "complex"),
    "half_complex": (lambda w: torch.complex(w, w).to(torch.complex32), "complex"),
    "sparse_coo": (lambda w: w.to_sparse(), "sparse_coo"),
    "sparse_csr": (lambda w: w.to_sparse_csr(), "sparse_csr"),
    "sparse_bsc": (lambda w: w.to_sparse_bsc((4, 4)), "sparse_bsc"),
    "mkldnn": (lambda w: w.to_mkldnn(), "mkldnn"),
    "nested": (lambda w: torch.nested.nested_tensor([*w]), "nested"),
    "nested_jagged": (lambda w: torch.nested.nested_tensor([*w], layout=torch.jagged), ""),
    "quantized_per_tensor": (lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), "quantized"),
    "quantized_per_channel": (
        lambda w: torch.quantize_per_channel(w, torch.ones(16), torch.zeros(16), 0, torch.quint8),
        "quantized",
    ),
    "float8_e4m3": (lambda w: w.to(torch.float8_e4m3fn), "quantized"),
    "float8_e5m2": (lambda w: w.to(torch.float8_e5m2), "quantized"),
    "float8_e8m0": (lambda w: of_dtype("float8_e8m0fnu"), "quantized|meta"),
    "float4": (lambda w: of_dtype("float4_e2m1fn_x2"), "quantized|meta"),
    "int4": (lambda w: of_dtype("int4"), "quantized|meta"),
    "uint4": (lambda w: of_dtype("uint4"), "quantized|meta"),
    "int2": (lambda w: of_dtype("int2"), "quantized|meta"),
    "bits8": (lambda w: of_dtype("bits8"), "quantized|meta"),
    "four_bits_of_bitsandbytes": (
        lambda w: having(torch.nn.Parameter(w.to(torch.uint8), requires_grad=False), quant_state=object()),
        "quantized.*bf16",
    ),
    "eight_bits_of_bitsandbytes": (
        lambda w: having(torch.nn.Parameter(w.to(torch.int8), requires_grad=False), SCB=torch.ones(16)),
        "quantized.*bf16",
    ),
    "packed_without_a_sign": (lambda w: torch.zeros(64, 1, dtype=torch.uint8), "quantized.*bf16"),
    "wrapper_subclass": (lambda w: TwoTensor(w, w.clone()), "TwoTensor"),
    "wrapper_in_a_parameter": (lambda w: torch.nn.Parameter(TwoTensor(w, w.clone())), ""),
    "computing_subclass": (Computing, "Computing"),
    "fake": (lambda w: FakeTensorMode().from_tensor(w), "FakeTensor"),
    "fake_on_a_gpu": (lambda w: fake_on("cuda"), "FakeTensor"),
    "functional": (torch._to_functional_tensor, ""),
    "batched": (lambda w: torch._C._functorch._add_batch_dim(w[None], 0, 1), ""),
    "zeros_without_memory": (lambda w: torch._efficientzerotensor(SHAPE), ""),
    "other_device": (lambda w: w.as_subclass(Elsewhere), "xpu.*cpu"),
    "numpy_array": (lambda w: w.numpy(), "ndarray"),
    "numpy_number": (lambda w: np.float32(1.5), "float32"),
    "list": (lambda w: w.tolist(), "list"),
    "text": (lambda w: "model.safetensors", "str"),
    "none": (lambda w: None, "NoneType"),
    "mock": (lambda w: mock.MagicMock(spec=torch.Tensor), ""),
    "sharded_on_meta": (
        lambda w: DTensor.from_local(w.to("meta"), mesh(), [Shard(0)], run_check=False),
        "meta device",
    ),
    "sharded_and_freed": (
        lambda w: DTensor.from_local(freed(w), mesh(), [Replicate()], run_check=False),
        "memory",
    ),
}


def fake_on(device: str) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(SHAPE, device=device)


def make_base(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    weights = {f"layers.{number}.weight": VALUES.bfloat16() + number for number in range(3)}
    save_file(weights, folder / "model.safetensors")
    return folder


def handed_over(base: Path) -> dict[str, Any]:
    return {name: tensor.float() for name, tensor in load_file(base / "model.safetensors").items()}


def publish_all(folder: Path) -> None:
    """Publish each of the tensors, as the first version and as a later one. Write down what happened."""
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    base = make_base(folder / "base")
    with (folder / "results").open("w") as results:
        for case, (make, _) in REFUSED.items():
            for at in (0, 1):
                results.write(json.dumps([case, at, outcome(folder, base, f"{case}-{at}", make, at)]) + "\n")
                results.flush()
    dist.destroy_process_group()


def outcome(folder: Path, base: Path, run: str, make: Make, at: int) -> tuple[str, bool, int]:
    """What `publish` says, whether the library says it, and how many versions the run has."""
    url = f"{(folder / 'bucket').as_uri()}#{run}"
    weights = handed_over(base)
    publisher = Publisher(url, base=base)
    if at:
        publisher.publish(weights.items())
        publisher.flush()
    said = ""
    known = False
    try:
        publisher.publish((weights | {NAME: make(weights[NAME])}).items())
        publisher.flush()
    except Exception as error:  # noqa: BLE001 - any error is a result
        said = f"{type(error).__name__}: {error}"
        known = isinstance(error, DeltaWeightSyncError)
    publisher.close()
    newest = open_run(url).newest()
    return said, known, newest.version + 1 if newest else 0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[str, bool, int]]:
    folder = tmp_path_factory.mktemp("hostile")
    process = forked.start(publish_all, folder)
    process.join(120)
    process.kill()
    lines = [json.loads(line) for line in (folder / "results").read_text().splitlines()]
    found = {(case, at): tuple(told) for case, at, told in lines}
    assert process.exitcode == 0, f"the process died with {process.exitcode} after {[*found][-1:]}"
    return found


@pytest.mark.parametrize("at", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_plain_memory_is_refused_by_name(case, at, results):
    said, known, versions = results[case, at]
    assert known, f"a sentence of the library, not {said!r}"
    assert re.search(rf"{re.escape(NAME)} .*\w.*: [a-z`]", said), f"the name, the reason, and the fix: {said}"
    assert re.search(REFUSED[case][1], said), said
    assert versions == at, "nothing of it is published"


# What lies in memory in another way is published as it is.

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int16, torch.uint8
LAYOUTS: dict[str, Make] = {
    "contiguous": lambda t: t,
    "strided_rows": lambda t: torch.stack([t, t], 1)[:, 0],
    "strided_columns": lambda t: torch.stack([t, t], 2)[..., 0],
    "transposed": lambda t: t.T.contiguous().T,
    "expanded_rows": lambda t: t[:1].expand(SHAPE),
    "expanded_columns": lambda t: t[:, :1].expand(SHAPE),
    "expanded_scalar": lambda t: t[0, 0].expand(SHAPE),
    "part_of_a_storage": lambda t: torch.cat([t, t, t]).view(-1)[131:259].view(SHAPE),
    "shared_memory": lambda t: t.clone().share_memory_(),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
    "buffer": torch.nn.Buffer,
    "part_of_a_graph": lambda t: t.requires_grad_() * 1 if t.is_floating_point() else t,
    "plain_subclass": lambda t: t.as_subclass(Plain),
    "resolved_views": lambda t: t.conj().resolve_conj().resolve_neg(),
    "inference": lambda t: made_for_inference(t),
}


def made_for_inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_can_be_read_is_published_exactly(layout, tmp_path):
    """In each dtype of a checkpoint; the first time, and after a change of some elements' lowest bits."""
    values = {str(dtype).removeprefix("torch."): (VALUES * 8 + 100).to(dtype) for dtype in DTYPES}
    base = make_base(tmp_path / "base")
    url = f"{(tmp_path / 'bucket').as_uri()}#run"
    large = {"large": torch.ones(100, 100, dtype=torch.bfloat16)}
    save_file(values | large, base / "model.safetensors")
    with Publisher(url, base=base) as publisher:
        for _ in range(2):
            given = {name: LAYOUTS[layout](tensor.clone()) for name, tensor in values.items()}
            publisher.publish((given | large).items())
            publisher.flush()
            (version,) = follow(url, into=tmp_path / "followed", once=True)
            found = load_file(version.path / "model.safetensors")
            wrong = [name for name, tensor in given.items() if not same_bits(tensor, found[name])]
            assert wrong == []
            for tensor in values.values():
                tensor.view(-1).view(torch.uint8)[:: 3 * tensor.element_size()] ^= 1


@pytest.mark.parametrize("call", ["publish", "publish_base", "digest"])
def test_every_way_to_hand_weights_over_refuses_them(call, tmp_path):
    base = make_base(tmp_path / "base")
    with contextlib.closing(Publisher(f"{(tmp_path / 'bucket').as_uri()}#run", base=base)) as publisher:
        weights = handed_over(base)
        if call == "digest":
            publisher.publish(weights)
        with pytest.raises(CodecError, match=rf"{NAME} is on the meta device"):
            getattr(publisher, call)(weights | {NAME: weights[NAME].to("meta")})


def test_a_module_whose_part_was_moved_away_is_refused_by_name(tmp_path):
    """As `accelerate` does it; the trainer goes on after the part has come back, in a new publisher."""
    base = make_base(tmp_path / "base")
    url = f"{(tmp_path / 'bucket').as_uri()}#run"
    layers = [torch.nn.Linear(*reversed(SHAPE), bias=False) for _ in range(3)]
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
    model.load_state_dict(handed_over(base))
    with contextlib.closing(Publisher(url, base=base)) as publisher:
        publisher.publish(model)
        publisher.flush()
        layers[1].to("meta")
        with pytest.raises(CodecError, match=rf"{NAME} is on the meta device"):
            publisher.publish(model)
    layers[1] = model["layers"][1] = torch.nn.Linear(*reversed(SHAPE), bias=False)
    with Publisher(url) as publisher:
        publisher.publish(model)
        assert publisher.flush().version == 1
