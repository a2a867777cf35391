"""Settings of the whole suite."""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for children, too: several threads would spin for a core

# The first call of a compiled kernel takes a second, later ones microseconds: deadlines would only be noise.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start servers come first: neither of two processes is left alone with them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("live")}
    items.sort(key=lambda item: item.path not in slow)
