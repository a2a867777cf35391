"""Limits and intervals of a run, on which trainers and readers agree."""

from typing import Final

POLL_S: Final = 1.0  # usual seconds between two requests for HEAD, without the Hub's events
MAX_ASSETS: Final = 1024  # max files of an anchor
MAX_PARTS: Final = 64  # max parts of a delta that a trainer writes
MAX_REFS: Final = 1 << 14  # max delta files in a manifest, and max jump files
MAX_TAGS: Final = 256  # max tags of a run
TAG_BYTES: Final = 16 << 10  # max bytes of a tag
HEAD_BYTES: Final = 64 << 10  # max bytes of a HEAD
MANIFEST_BYTES: Final = (
    1 << 20
)  # max bytes of a manifest; the largest that a trainer writes has less than half
LOG_FLUSHES: Final = 512  # max flushes of a trainer in one object of the log
LARGEST: Final = 1e15  # the largest number that a log event may report, in any unit
STRIDES: Final = (8, 64)  # versions that a jump spans
ANCHOR_PAYS: Final = 0.5  # write an anchor when a join must fetch deltas of more than this share of the model
MAX_FILES: Final = 128  # write an anchor when a join needs this many deltas and jumps, however small
# A manifest names at least the deltas of the newest 64 versions. But if one of these versions was published
# whole, without a delta, the manifest names only the deltas of later versions.
WINDOW: Final = 64
