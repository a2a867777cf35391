"""Settings of the whole suite."""

import pytest
from hypothesis import settings

# The first call of a compiled kernel takes a second, later ones microseconds: deadlines would only be noise.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow files first, so that several workers end at about the same time."""
    items.sort(key=lambda item: item.get_closest_marker("live") is None)
