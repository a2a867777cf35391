"""Which run, and which version of it: the words that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from delta_weight_sync.history import RunReader, open_run
from delta_weight_sync.protocol import Manifest


def add_run(parser: argparse.ArgumentParser) -> None:
    """`RUN` and `--run`."""
    parser.add_argument(
        "url",
        metavar="RUN",
        help="hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>; of several runs in a"
        " bucket one is named by #<run> at the end",
    )
    parser.add_argument("--run", metavar="NAME", help="the same name, as a word of its own")


def add_version(parser: argparse.ArgumentParser) -> None:
    """`--version`."""
    parser.add_argument("--version", type=int, metavar="N", help="default: the newest")


def opened(arguments: argparse.Namespace) -> RunReader:
    """The run that the words name; raises `BucketError` or `ProtocolError`."""
    return open_run(arguments.url, arguments.run)


def versions(reader: RunReader) -> Iterator[Manifest]:
    """Every version that was not deleted, newest first; raises `ProtocolError` for a run that has none."""
    manifest: Manifest | None = reader.at()
    while manifest:
        yield manifest
        manifest = reader.parent(manifest)


def deleted(oldest: Manifest) -> str:
    """What to say of the versions before the oldest that is left; "" where none is missing."""
    if oldest.parent is None:
        return ""
    return f"older ones were deleted; {oldest.version} is the oldest that was kept"
