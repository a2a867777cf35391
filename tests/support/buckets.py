"""Buckets that count what is asked of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from delta_weight_sync.store import Bucket


class CountedBucket:
    """Passes everything on to a bucket, and counts the calls by method and the downloads by key."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.url = bucket, bucket.url
        self.asked, self.fetched = Counter[str](), Counter[str]()

    def __getattr__(self, name: str):
        self.asked[name] += 1
        return getattr(self.bucket, name)

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        self.asked["fetch"] += 1
        self.fetched[key] += 1
        return self.bucket.fetch(key, dest, limit)
