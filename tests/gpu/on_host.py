"""Tensors of the host in place of a GPU's: the code for GPUs runs on them as it is."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from delta_weight_sync import gpu


@pytest.fixture
def on_a_device() -> Iterator[None]:
    """Parameters on the host are compared as those on a GPU are."""
    with forced():
        yield


@contextmanager
def forced() -> Iterator[None]:
    """The same for a process that no test runs in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("delta_weight_sync.publish.mirror.on_device", lambda tensor: True)
        yield


class Operations(TorchDispatchMode):
    """Counts what torch runs, and how often a GPU's host would wait for it.

    An empty tensor and a view are no work. The host waits for the number of nonzero elements, for a number
    that it asks for, and for each call of `gpu.wait`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_name = Counter[str]()
        self.waits = 0

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(gpu, "wait", self._wait)
        return super().__enter__()

    def __exit__(self, *raised):
        self._patch.undo()
        return super().__exit__(*raised)

    def _wait(self, device):
        self.waits += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        empty = name in {"aten::empty.memory_format", "aten::empty", "aten::empty_like"}
        self.by_name[name] += not empty and not function.is_view
        self.waits += name in {"aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select"}
        return function(*args, **(kwargs or {}))

    @property
    def launches(self) -> int:
        return self.by_name.total()


class Devices:
    """A stand-in for CUDA's current device, which belongs to a thread and begins with 0."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def current(self) -> int:
        return getattr(self._local, "index", 0)

    @contextmanager
    def on(self, index: int | None) -> Iterator[None]:
        """What `torch.accelerator.device_index` does."""
        before = self.current
        self._local.index = before if index is None else index
        try:
            yield
        finally:
            self._local.index = before
