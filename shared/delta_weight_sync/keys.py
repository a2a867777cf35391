"""The key names of a run's objects, and who wrote them."""

from __future__ import annotations

import re
from typing import NamedTuple, Self
from uuid import uuid4

from delta_weight_sync.protocol import RUN_NAME
from delta_weight_sync.refs import ProtocolError

_NUMBER = r"\d{8,18}"  # a version or a term: what no record could hold is not read from a key either
_LAST_TERM = 10**18 - 1
_HEAD = re.compile(rf".*/heads/({_NUMBER})\.([0-9a-f]{{32}})\.json")
_STATE = re.compile(rf".*/state/({_NUMBER})\.{_NUMBER}\.t[^/]*\.json")
_PART = re.compile(
    rf".*/(anchors|deltas|jumps|manifests)/(?:{_NUMBER}-)?({_NUMBER})\.(t\d{{1,18}}-[0-9a-f]{{8}})[./].*"
)
_MANIFEST = re.compile(rf".*/manifests/({_NUMBER})\.t(\d{{1,18}})-([0-9a-f]{{8}})\.json")


class Writer(NamedTuple):
    """A trainer that took a run over; of two the greater one owns the run.

    `term` grows by one with each of them, `id` is 32 random hex digits: two trainers that were started at
    the same instant may have one term, and still each its own objects.
    """

    term: int
    id: str

    @classmethod
    def after(cls, others: list[Writer]) -> Self:
        """A new one, of a higher term than all `others`; `ProtocolError` where there is none."""
        last = max(others, default=None)
        if last and last.term >= _LAST_TERM:
            raise ProtocolError(
                f"a HEAD claims this run with term {last.term}, after which none comes: delete"
                f" heads/{last.term:08d}.{last.id}.json of the run, or begin another run"
            )
        return cls(1 + (last.term if last else 0), uuid4().hex)

    def __str__(self) -> str:
        return f"t{self.term}-{self.id[:8]}"


class Keys:
    """The key names of one run."""

    def __init__(self, run: str) -> None:
        if not re.fullmatch(RUN_NAME, run):
            raise ProtocolError(f"run name {run!r} may hold letters, digits, '.', '_' and '-' only")
        self.run = run
        self.folder = f"runs/{run}/"
        self.heads = f"{self.folder}heads/"
        self.manifests = f"{self.folder}manifests/"
        self.states = f"{self.folder}state/"
        self.info = f"{self.folder}run.json"
        self.log = f"{self.folder}log/"

    def head(self, writer: Writer) -> str:
        """Key of a writer's HEAD, which nobody else overwrites."""
        return f"{self.heads}{writer.term:08d}.{writer.id}.json"

    def anchor(self, version: int, writer: Writer, name: str) -> str:
        """Key of one file of an anchor."""
        return f"{self.folder}anchors/{version:08d}.{writer}/{name}"

    def delta(self, version: int, writer: Writer) -> str:
        """Key of the delta that leads to `version`."""
        return f"{self.folder}deltas/{version:08d}.{writer}.safetensors"

    def jump(self, base: int, version: int, writer: Writer) -> str:
        """Key of the delta that leads from `base` over several versions to `version`."""
        return f"{self.folder}jumps/{base:08d}-{version:08d}.{writer}.safetensors"

    def manifest(self, version: int, writer: Writer) -> str:
        """Key of a version's manifest."""
        return f"{self.manifests}{version:08d}.{writer}.json"

    def state(self, version: int, sync: int, writer: Writer) -> str:
        """Of the trainer's state at `version`, handed over as `sync`: its folder; with .json, its record."""
        return f"{self.states}{version:08d}.{sync:08d}.{writer}"

    def segment(self, number: int) -> str:
        """Key of one segment of the run's log."""
        return f"{self.log}{number:08d}.jsonl"


class ManifestKey(NamedTuple):
    """What the key of a manifest says; they sort by who wrote them, then by version."""

    term: int
    id: str  # the first 8 digits of the writer's
    version: int

    def of(self, writer: Writer | None) -> bool:
        """True for a manifest of `writer`, and for any where that is None."""
        return writer is None or (self.term, self.id) == (writer.term, writer.id[:8])


class VersionKey(NamedTuple):
    """What the key of any part of a version says; they sort by version."""

    version: int
    writer: str  # as in the key: t1-5ad0b5d1
    kind: str  # anchors, deltas, jumps or manifests


def version_key(key: str) -> VersionKey | None:
    """What the key of a part of a version says; None for the key of something else."""
    match = _PART.fullmatch(key)
    return VersionKey(int(match[2]), match[3], match[1]) if match else None


def state_version(key: str) -> int | None:
    """The version that a trainer's state belongs to, of the key of its record; None for another key."""
    match = _STATE.fullmatch(key)
    return int(match[1]) if match else None


def head_writer(key: str) -> Writer | None:
    """Whose HEAD has this key; None for the key of something else."""
    match = _HEAD.fullmatch(key)
    return Writer(int(match[1]), match[2]) if match else None


def manifest_key(key: str) -> ManifestKey | None:
    """What the key of a manifest says; None for the key of something else."""
    match = _MANIFEST.fullmatch(key)
    return ManifestKey(int(match[2]), match[3], int(match[1])) if match else None
