"""A checkpoint for the tests that start no model of their own."""

from pathlib import Path

import pytest

from tests.support import tiny_policy as tiny


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny.build(tmp_path / "base", tie=True, seed=0)
    return tmp_path / "base"
