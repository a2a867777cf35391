"""Settings of the whole suite, and how it is shared by several processes."""

import gc
import logging
import multiprocessing.spawn
import os
import tempfile
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for children, too: several threads would spin for a core
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns of what it calls experimental

# The same cases each time, for a test that passes has to pass again; tests.fuzz looks for new ones. The first
# call of a compiled kernel takes a second, later ones microseconds: deadlines would only be noise.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replica that a test makes in this process sets for the whole process ends with the test."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", tempfile.gettempdir())  # a folder that ends with the server
    # The program that starts children: a replica's engine gets only some variables.
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", multiprocessing.spawn.get_executable())
    # The plugin gives the library's log to vLLM's handlers, which pytest does not see.
    monkeypatch.setattr(logging.getLogger("delta_weight_sync"), "parent", logging.getLogger())


def pytest_collection_finish() -> None:
    """What was imported stays: without it, each look for garbage is many times as fast."""
    gc.freeze()


# They share the replica of tests/live/conftest.py, in this order: the last of them end its vLLM.
ONE_REPLICA = [
    f"tests/live/test_{name}.py"
    for name in ("public_port", "route_audit", "commit", "canary", "ratios", "replica", "restarts")
]


# What else takes long: longer than what is collected last.
LONG = [
    f"tests/{name}.py"
    for name in (
        *("web/test_web", "chaos/test_chaos", "inference_space/dashboard/test_in_browser"),
        *("trainer/deploy/test_up", "trainer/test_demo", "publish/test_sharding"),
    )
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts vLLM or takes long comes first, so that no process is left alone with it at the end."""
    live = {item.path for item in items if item.get_closest_marker("live")}

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        long = item.nodeid.split("::", 1)[0] in LONG
        return item.path not in live and not long, long, _turn(item.nodeid)

    items.sort(key=place)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays in one process, and so do those that share a replica."""
    return _ByFile(config, log)


class _ByFile(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return "one replica" if _turn(nodeid) >= 0 else super()._split_scope(nodeid)


def _turn(nodeid: str) -> int:
    file = nodeid.split("::", 1)[0]
    return ONE_REPLICA.index(file) if file in ONE_REPLICA else -1
