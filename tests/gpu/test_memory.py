"""Pinned memory and a second stream, asked of stand-ins for a GPU's driver; kernels compile for GPUs."""

import contextlib
import gc
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from delta_weight_sync.gpu import free_bytes, pin
from tests.gpu.interpreted import interpreted

publish_gpu = interpreted("delta_weight_sync.publish._gpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch):
    calls = mock.Mock()
    calls.cudaHostRegister.return_value = 0
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch.cuda, "check_error", _check)
    monkeypatch.setattr("delta_weight_sync.gpu._uses_host_addresses", lambda: calls.sees_host)
    return calls


def _check(answer):
    if answer:
        raise torch.cuda.CudaError(answer)


def test_the_mirror_is_pinned_in_one_block_of_its_size(driver):
    """Not in a block per tensor, each rounded up; and it is let go with the mirror."""
    owner, generator = mock.Mock(), torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (), "c": (0,), "d": (1001,)}
    bits = {n: torch.randint(-9, 9, s, dtype=torch.int16, generator=generator) for n, s in shapes.items()}
    before = {name: tensor.clone() for name, tensor in bits.items()}
    pin(owner, bits, list(bits), CUDA)
    address, size, _ = driver.cudaHostRegister.call_args.args
    assert driver.cudaHostRegister.call_count == 1
    assert 0 <= size - sum(t.nbytes for t in bits.values()) < 16 * len(bits)
    for name, tensor in bits.items():
        assert torch.equal(tensor, before[name])
        assert tensor.numel() == 0 or address <= tensor.data_ptr() <= address + size - tensor.nbytes
    driver.cudaHostUnregister.assert_not_called()
    del owner
    gc.collect()
    driver.cudaHostUnregister.assert_called_once_with(address)


@pytest.mark.parametrize(
    ("code", "sees_host", "said"), [(2, True, "cannot be pinned"), (0, False, "at another address")]
)
def test_memory_that_cannot_be_pinned_is_a_sentence(driver, monkeypatch, code, sees_host, said):
    """Nor memory that the GPU would see elsewhere."""
    monkeypatch.setattr(torch.cuda.CudaError, "__init__", lambda self, code: None)
    driver.cudaHostRegister.return_value, driver.sees_host = code, sees_host
    with pytest.raises(MemoryError, match=rf'{said} .* with mirror="device"'):
        pin(mock.Mock(), {"a": torch.ones(3, dtype=torch.int16)}, ["a"], CUDA)


def test_memory_that_torch_holds_unused_is_free(monkeypatch):
    """Else staged data would go over the bus after the first sync, although its memory lies ready."""
    for name, size in (("mem_get_info", (100, 1000)), ("memory_reserved", 50), ("memory_allocated", 20)):
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    assert free_bytes(CUDA) == 130


def test_the_mirror_is_read_behind_the_last_write_and_nothing_else(monkeypatch):
    """On a stream of its own: training that was queued since is not waited for."""
    done = []
    training = SimpleNamespace(record_event=lambda: "written", device=CUDA)
    second = SimpleNamespace(device=CUDA, wait_event=lambda event: done.append(event))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: second)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(done.append(stream)))
    monkeypatch.setattr(torch.accelerator, "device_index", contextlib.nullcontext)
    tiles = SimpleNamespace(count=0, entries=None, row_of=None)
    diff, memory = publish_gpu.DeviceDiff(CUDA), torch.ones(3)
    assert torch.equal(diff.read(memory), memory)
    diff.keep(SimpleNamespace(tiles=tiles, book=None, found=None))  # with no tile, nothing is launched
    diff.read(memory)
    assert done == [second, second, "written"]


@pytest.mark.full
@pytest.mark.parametrize(
    "architecture", ["80", *(pytest.param(n, marks=pytest.mark.long) for n in ("89", "90", "100"))]
)
def test_there_is_machine_code_for_gpus(tmp_path, architecture):
    """In a process of its own: in this one Triton interprets. Whole tiles are read 16 bytes at a time."""
    # Without a choice of FP fusion Triton warns that its default will change.
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    words = [sys.executable, "-m", "tests.gpu.compiled", architecture]
    said = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    kernels = json.loads(said.stdout)
    assert all(kernel["machine code"] for kernel in kernels.values())
    whole = {"find bf16, whole", "find fp32, whole", "digest of whole tiles"}
    assert {name for name, kernel in kernels.items() if kernel["16 bytes"]} == whole
