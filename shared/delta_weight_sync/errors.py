"""The root of everything that this library raises on purpose; each error stands beside what raises it."""

from __future__ import annotations

from typing import Final

_LONGEST: Final = 4000  # characters of a message


class DeltaWeightSyncError(Exception):
    """Something that the caller can mend: the message is a sentence with the fix, and holds no token.

    Messages quote what was found in a bucket, and are printed, logged and shown: so they are one line.
    """

    def __str__(self) -> str:
        return printable(super().__str__()[:_LONGEST])[:_LONGEST]


def printable(text: str) -> str:
    r"""`text` in one line without control codes: an escape character is written as `\x1b`."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )
