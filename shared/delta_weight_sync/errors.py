"""The root of everything that this library raises on purpose; each error stands beside what raises it."""

from __future__ import annotations


class DeltaWeightSyncError(Exception):
    """Something that the caller can mend: the message is a sentence with the fix, and holds no token."""
