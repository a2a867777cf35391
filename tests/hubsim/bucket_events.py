"""The feed of a bucket's changes: what huggingface_hub's file system follows, and replicas that wait."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel

from .buckets import BucketState
from .errors import HubError


class Feed(BaseModel, extra="forbid"):
    """How the feeds of all buckets are served; a test may change it."""

    ping_s: float = 0.05  # a client looks only now whether it still wants to follow; of the real Hub about 30
    mute: bool = False  # connections live, but no change is told
    silent: bool = False  # connections stay open, and nothing is said any more
    forgets: bool = False  # no cursor of before can be resumed


def place(bucket: BucketState, cursor: str | None, rules: Feed) -> int | None:
    """How many changes a client with this cursor has been told; None where it must begin anew."""
    if cursor is None:
        return len(bucket.changes)
    if not cursor.isdigit() or int(cursor) > len(bucket.changes):
        raise HubError(400, "Invalid cursor")
    return None if rules.forgets else int(cursor)


async def feed(bucket: BucketState, told: int | None, since: str, rules: Feed) -> AsyncIterator[str]:
    """Server-sent events: the changes after the first `told` and the time `since`, then those to come."""
    if told is None:
        yield _event("reset", reason="cursor_too_old")
        return
    missed = [change for change in bucket.changes[0 if since else told :] if change["uploadedAt"] >= since]
    told = len(bucket.changes)
    if missed:
        yield _event("changes", cursor=str(told), changes=missed)
    yield _event("ready", cursor=str(told))
    async for event in _news(bucket, told, rules):
        yield event


async def _news(bucket: BucketState, told: int, rules: Feed) -> AsyncIterator[str]:
    with bucket.listener() as bell:
        endings = bucket.endings
        while bucket.endings == endings:
            if (fresh := bucket.changes[told:]) and not (rules.silent or rules.mute):
                told += len(fresh)
                yield _event("changes", cursor=str(told), changes=fresh)
            try:
                await asyncio.wait_for(bell.wait(), rules.ping_s)
                bell.clear()
            except TimeoutError:
                if not rules.silent:
                    yield ": ping\n\n"
    if bucket.politely:
        yield _event("reconnect", cursor=str(told))


def _event(name: str, **payload: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(payload)}\n\n"
