"""Times, shares and versions as people read them; bytes and counts are in `delta_weight_sync.units`."""

from __future__ import annotations

from datetime import UTC, datetime


def duration(seconds: float) -> str:
    """A span of time: `18 ms`, `2.1 s`, `3.4 min`."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.00995 else f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds / 60)} min" if seconds < 7200 else f"{_digits(seconds / 3600)} h"


def age(minutes: int) -> str:
    """A rough span of time: `3 min`, `5 h`, `12 days`."""
    hours = minutes // 60
    return f"{minutes} min" if hours < 2 else f"{hours} h" if hours < 48 else f"{hours // 24} days"


def percent(share: float) -> str:
    """A share of 1: `0.83 %`."""
    return f"{_digits(100 * share)} %"


def clock(t: float) -> str:
    """Unix seconds as a time of day in UTC."""
    return f"{datetime.fromtimestamp(t, UTC):%H:%M:%S} UTC"


def plural(count: int, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def behind(versions: int) -> str:
    """How far a replica is from the newest version: `current`, `2 versions behind`."""
    return "current" if versions <= 0 else f"{plural(versions, 'version')} behind"


def _digits(value: float) -> str:
    if abs(value) < 0.0995:
        return f"{value:.2g}"
    return f"{value:.0f}" if abs(value) >= 99.5 else f"{value:.1f}" if abs(value) >= 9.95 else f"{value:.2f}"
