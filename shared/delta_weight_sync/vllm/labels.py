"""What vLLM puts on each token: the published version that made it."""

from __future__ import annotations

import re
from typing import NamedTuple

from delta_weight_sync.protocol import Manifest


class Label(NamedTuple):
    """The version, who published it, and at which of the trainer's syncs; printed as "version.term.sync"."""

    version: int
    term: int
    sync: int

    def __str__(self) -> str:
        return ".".join(map(str, self))

    @classmethod
    def of(cls, manifest: Manifest) -> Label:
        """That of a published version."""
        return cls(manifest.version, manifest.writer_term, manifest.sync)

    @classmethod
    def parse(cls, text: str) -> Label | None:
        """The label that was printed so; None for those of vLLM itself, such as "default"."""
        known = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text, re.ASCII)
        return cls(*map(int, known.groups())) if known else None
