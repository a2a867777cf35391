"""Pinned memory, a second stream and the current device, asked of stand-ins for a GPU's driver."""

import contextlib
import gc
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from delta_weight_sync import gpu
from delta_weight_sync.codec import Patch
from delta_weight_sync.publish import _gpu, mirror
from delta_weight_sync.publish.blocks import Block, Part
from delta_weight_sync.publish.mirror import Mirror
from tests.gpu.on_host import Devices, Operations

CUDA = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch):
    calls = mock.Mock()
    calls.cudaHostRegister.return_value = 0
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch.cuda, "check_error", _check)
    return calls


def _check(answer):
    if answer:
        raise torch.cuda.CudaError(answer)


def test_the_mirror_on_the_host_is_pinned_until_it_is_let_go(driver):
    owner = mock.Mock()
    memory = torch.zeros(1001, dtype=torch.int16)
    gpu.pin(owner, memory)
    address = memory.data_ptr()
    assert driver.cudaHostRegister.call_args.args[:2] == (address, memory.nbytes)
    del memory
    driver.cudaHostUnregister.assert_not_called()
    del owner
    gc.collect()
    driver.cudaHostUnregister.assert_called_once_with(address)


def test_memory_that_cannot_be_pinned_is_a_sentence(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda.CudaError, "__init__", lambda self, code: None)
    driver.cudaHostRegister.return_value = 2
    with pytest.raises(MemoryError, match=r'cannot be pinned .* with mirror="device"'):
        gpu.pin(mock.Mock(), torch.ones(3, dtype=torch.int16))


def test_all_mirrors_move_into_one_tensor():
    """Not into one per tensor, each rounded up."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (), "c": (0,), "d": (1001,)}
    bits = {n: torch.randint(-9, 9, s, dtype=torch.int16, generator=generator) for n, s in shapes.items()}
    before = {name: tensor.clone() for name, tensor in bits.items()}
    memory = torch.empty(1017, dtype=torch.int16)
    gpu.join(bits, list(bits), memory)
    assert torch.equal(memory, torch.cat([tensor.view(-1) for tensor in before.values()]))
    for name, tensor in bits.items():
        assert torch.equal(tensor, before[name])
        assert gpu.words_of(tensor).data_ptr() == memory.data_ptr()


def test_memory_that_torch_holds_unused_is_free(monkeypatch):
    """Else staged data would go over the bus after the first sync, although its memory lies ready."""
    for name, size in (("mem_get_info", (100, 1000)), ("memory_reserved", 50), ("memory_allocated", 20)):
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    assert gpu.free_bytes(CUDA) == 130


def test_the_mirror_is_read_behind_the_last_write_and_nothing_else(monkeypatch):
    """On a stream of its own: training that was queued since is not waited for."""
    done = []
    training = SimpleNamespace(record_event=lambda: "written", device=CUDA)
    second = SimpleNamespace(device=CUDA, wait_event=lambda event: done.append(event))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: second)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(done.append(stream)))
    monkeypatch.setattr(torch.accelerator, "device_index", contextlib.nullcontext)
    monkeypatch.setattr(gpu, "read", lambda tensors, device: tensors)
    diff = _gpu.DeviceDiff(CUDA)
    memory = torch.ones(3)
    assert torch.equal(diff.read(memory), memory)
    diff.keep(SimpleNamespace(kept=[]))
    diff.read(memory)
    assert done == [second, second, "written"]


def test_a_publisher_uses_its_own_device_in_every_thread(monkeypatch):
    """Also where the thread's current device is 0, as in the publisher's own."""
    devices = Devices()
    monkeypatch.setattr(torch.accelerator, "device_index", devices.on)
    monkeypatch.setattr(mirror, "on_device", lambda tensor: True)
    state = {"a": torch.randn(50), "b": torch.randn(70)}
    kept = Mirror("device")
    seen = set()
    for name, tensor in state.items():
        kept.add(name, tensor)
    kept.find_on_devices([Part(n, t, Block.whole(t.shape), True) for n, t in state.items()])
    diff = _gpu.DeviceDiff(torch.device("cpu", 1))

    class Watch(Operations):
        def __torch_dispatch__(self, function, *given, **more):
            if not function.is_view:  # a view is no work
                seen.add(devices.current)
            return super().__torch_dispatch__(function, *given, **more)

    with Watch():
        parts = [Part(name, t * 2, Block.whole(t.shape), True) for name, t in state.items()]
        seen.clear()
        found = diff.find(parts, kept._bits)
        diff.keep(found)
        diff.read(kept._bits["a"])
        diff.take([Patch("a", (50,), np.array([3]), np.array([1], np.uint16))], kept._bits)
    assert seen == {1}
