"""The run log: written by one thread at a time, whoever asks for it to be written."""

from __future__ import annotations

import threading
from pathlib import Path

from delta_weight_sync.runlog import DoneEvent, RunLogReader, RunLogWriter
from delta_weight_sync.store._files import FileBucket

_DIGEST = "0" * 16
_LONG_S = 3600


class Meeting(FileBucket):
    """A bucket where an upload waits a little for another one to begin."""

    def __init__(self, url: str) -> None:
        super().__init__(url, create=True)
        self.at_once, self._second = 0, threading.Semaphore(0)

    def put(self, key: str, data: bytes | Path) -> None:
        self.at_once += 1
        if self.at_once > 1:
            self._second.release()
        elif self._second.acquire(timeout=0.3):
            self.met = True
        super().put(key, data)
        self.at_once -= 1

    met = False


def test_two_threads_that_flush_write_one_after_the_other(tmp_path: Path) -> None:
    """Otherwise the older lines may end up on top of the newer ones."""
    bucket = Meeting(f"file://{tmp_path}")
    log = RunLogWriter(bucket, "test", every_s=_LONG_S)
    for version in range(3):
        log.append(DoneEvent(t=0.0, version=version, digest=_DIGEST))
        flushing = threading.Thread(target=log.flush)
        flushing.start()
        log.append(DoneEvent(t=1.0, version=version, digest=_DIGEST))
        log.flush()
        flushing.join()
    log.close()
    assert not bucket.met
    assert len(list(RunLogReader(bucket, "test").poll())) == 6
