"""A folder as the bucket of a run."""

from pathlib import Path

import pytest

from delta_weight_sync.store import Bucket, open_bucket


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return open_bucket(f"file://{tmp_path}/bucket", create=True)
