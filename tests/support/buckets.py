"""Buckets that count what is asked of them, and what can be asked of one."""

from collections import Counter
from pathlib import Path

import pytest

from delta_weight_sync.store import Bucket

KEY = "runs/demo/HEAD"
OPERATIONS = {
    "put": lambda bucket: bucket.put(KEY, b"new"),
    "get": lambda bucket: bucket.get(KEY),
    "stat": lambda bucket: bucket.stat(KEY),
    "list": lambda bucket: bucket.list(""),
    "delete": lambda bucket: bucket.delete([KEY]),
}
every_operation = pytest.mark.parametrize("operate", OPERATIONS.values(), ids=OPERATIONS.keys())


class CountedBucket:
    """Passes everything on to a bucket, and counts the calls by method and the downloads by key."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.url = bucket.url
        self.asked = Counter[str]()
        self.fetched = Counter[str]()

    def __getattr__(self, name: str):
        self.asked[name] += 1
        return getattr(self.bucket, name)

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        self.asked["fetch"] += 1
        self.fetched[key] += 1
        return self.bucket.fetch(key, dest, limit)
