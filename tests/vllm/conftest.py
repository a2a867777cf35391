"""A folder as the bucket of a run, and a vLLM to follow it."""

from pathlib import Path

import pytest

from delta_weight_sync.store import Bucket, open_bucket
from tests.support.fake_vllm import Mortal


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return open_bucket(f"file://{tmp_path}/bucket", create=True)


@pytest.fixture
def vllm() -> Mortal:
    return Mortal()
