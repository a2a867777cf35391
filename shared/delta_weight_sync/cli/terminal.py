"""What may be written to a terminal: names come out of a bucket that somebody else may have filled."""

from __future__ import annotations

import time

from delta_weight_sync.protocol import Manifest


def utc(t: float) -> str:
    """Unix seconds as a date and time of 19 characters; of what no calendar has, question marks."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))
    except (OverflowError, ValueError, OSError):
        return "????-??-?? ??:??:??"


def payload(manifest: Manifest) -> int:
    """Bytes of what a version added to the bucket: of its delta, or of version 0's files."""
    files = manifest.deltas[-1:] or manifest.anchor.files
    return sum(file.size for file in files)
