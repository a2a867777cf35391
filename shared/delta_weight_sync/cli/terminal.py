"""What may be written to a terminal: names come out of a bucket that somebody else may have filled."""

from __future__ import annotations

import time

from delta_weight_sync.protocol import Manifest


def printable(text: str) -> str:
    r"""`text` in one line without control codes: an escape character is written as `\x1b`."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


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
