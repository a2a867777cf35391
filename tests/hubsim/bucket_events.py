"""The feed of a bucket's changes, which huggingface_hub's file system follows to keep its listings fresh."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from .buckets import BucketState

PAUSE = 0.05  # seconds between two looks at the bucket


async def feed(bucket: BucketState, cursor: int, since: str) -> AsyncIterator[str]:
    """Server-sent events: the changes after `cursor` (a count) and the time `since`, then those to come."""
    missed = [change for change in bucket.changes[cursor:] if change["uploadedAt"] >= since]
    sent = len(bucket.changes)
    if missed and (cursor or since):
        yield _event("changes", cursor=str(sent), changes=missed)
    yield _event("ready", cursor=str(sent))
    while True:
        if fresh := bucket.changes[sent:]:
            sent += len(fresh)
            yield _event("changes", cursor=str(sent), changes=fresh)
        await asyncio.sleep(PAUSE)
        yield ": the client looks only now whether it still wants to follow\n\n"


def _event(name: str, **payload: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(payload)}\n\n"
