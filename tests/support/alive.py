"""How many manifests are in memory at once."""

import weakref
from typing import Any

import pytest

from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest


class Alive:
    """The manifests that a reader has read: how many, and how many were in memory at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen = list[weakref.ref[Manifest]]()
        self.most = 0
        read = RunReader.read

        def noted(reader: RunReader, kind: Any, source: Any) -> Any:
            record = read(reader, kind, source)
            if kind is Manifest:
                self._seen.append(weakref.ref(record))
                self.most = max(self.most, sum(seen() is not None for seen in self._seen))
            return record

        monkeypatch.setattr(RunReader, "read", noted)

    @property
    def read(self) -> int:
        """How many were read."""
        return len(self._seen)
