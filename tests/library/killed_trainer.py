"""A trainer that `kill -9` ends at a chosen moment of what it writes into a folder."""

import itertools
import os
import signal
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import torch

from delta_weight_sync.publish.outbox import Outbox
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import open_bucket

RUN = "test"


def publish(url: str, assets: Path, last: int, whole: bool) -> None:
    """Publish version after version, and die at object number `last`: with half of it written, or all."""
    bucket, numbers = open_bucket(url, create=True), itertools.count(1)
    put = bucket.put

    def put_or_die(key: str, data: bytes | Path) -> None:
        if "/log/" in key or next(numbers) != last:
            return put(key, data)
        if whole:
            put(key, data)
            _die()
        with mock.patch("delta_weight_sync.store._files._write", _write_half):
            return put(key, data)

    with mock.patch.object(bucket, "put", put_or_die):
        outbox = Outbox(RunWriter(bucket, RUN, model="policy", assets=assets), RunLogWriter(bucket, RUN))
        weights = {"embed.weight": torch.ones(600, 100), "norm.weight": torch.ones(64)}
        for sync in itertools.count(1):
            weights["embed.weight"][0] = torch.randn(100)  # few changes: no anchor is due in this test
            outbox.publish(weights.items(), sync)
            outbox.flush()


def _write_half(file: BinaryIO, data: bytes | Path) -> None:
    content = data if isinstance(data, bytes) else data.read_bytes()
    file.write(content[: len(content) // 2])
    file.flush()
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
