"""Settings of the whole suite, and how it is shared by several processes."""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for children, too: several threads would spin for a core

# The same cases each time, for a test that passes has to pass again; tests.fuzz looks for new ones. The first
# call of a compiled kernel takes a second, later ones microseconds: deadlines would only be noise.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

# They share the replica of tests/live/conftest.py, in this order: the last of them end its vLLM.
ONE_REPLICA = ["public_port", "route_audit", "commit", "replica", "owner", "restarts"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file stays in one process, and so do those that share a replica; what starts vLLM comes first."""
    for item in items:
        shared = item.path.parent.name == "live" and _subject(item) in ONE_REPLICA
        item.add_marker(pytest.mark.xdist_group("one replica" if shared else str(item.path)))
    live = {item.path for item in items if item.get_closest_marker("live")}
    items.sort(key=lambda item: (item.path not in live, _turn(item)))


def _subject(item: pytest.Item) -> str:
    return item.path.stem.removeprefix("test_")


def _turn(item: pytest.Item) -> int:
    return ONE_REPLICA.index(_subject(item)) if _subject(item) in ONE_REPLICA else -1
