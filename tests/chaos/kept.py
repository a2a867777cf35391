"""`delta-weight-sync follow` in a process, and what anybody reads in its folder."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from pathlib import Path
from unittest import mock

from safetensors import SafetensorError

from delta_weight_sync.checkout import RECORD, updates
from delta_weight_sync.checkpoint import WEIGHTS, map_bits
from delta_weight_sync.cli import main
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.records import Manifest, parse
from tests.chaos.replica import RUN, Claim
from tests.chaos.trainer import Mortal


class Kept(Mortal):
    """The command, in a thread: faults are armed by the main one."""

    def __init__(self, url: str, folder: Path, poll_s: float) -> None:
        super().__init__()
        null = os.open(os.devnull, os.O_WRONLY)  # a log on the disk that is full would end it
        os.dup2(null, 1)
        os.dup2(null, 2)
        quick = functools.partial(updates, poll_s=poll_s)
        mock.patch("delta_weight_sync.cli.follow.updates", quick).start()
        mock.patch("delta_weight_sync.watch.LONGEST_S", 4 * poll_s).start()
        mock.patch("delta_weight_sync.reader.open_bucket", self.open_bucket).start()
        mock.patch("delta_weight_sync.cli.follow._ended_by_signals", contextlib.nullcontext).start()
        words = ["follow", f"{url}#{RUN}", "--into", str(folder)]
        threading.Thread(target=self._follow, args=[words], daemon=True).start()

    def _follow(self, words: list[str]) -> None:
        try:
            main(words)
        finally:
            os._exit(1)  # it should never end by itself: the director sees a death

    def close(self) -> None:
        pass


def read(folder: Path) -> Claim | None:
    """What a reader of the folder sees; None before there is a version, and where it was replaced."""
    current = folder / "current"
    try:
        place = current.resolve(strict=True)
        manifest = parse(Manifest, (place / RECORD).read_bytes(), RECORD)
        held = to_hex(state_digest(map_bits(place / WEIGHTS)))
    except (FileNotFoundError, ProtocolError, SafetensorError):
        return None
    told = manifest.version, manifest.writer, manifest.sync, manifest.digest
    return Claim(*told, held, 0, "serving", None, ())
