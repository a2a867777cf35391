"""The keys of a run's objects, and what a key says about its object.

Each writer uses keys of its own for HEAD, versions and states, so a replaced trainer cannot overwrite objects
of its successor.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Self
from uuid import uuid4

from delta_weight_sync.errors import ConfigError, ProtocolError
from delta_weight_sync.records.limits import LOG_FLUSHES

RUN_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
TAG_NAME: Final = r"[A-Za-z][A-Za-z0-9._-]{0,63}"
LINK: Final = re.compile(r"(?:deltas/|jumps/\d+-)\d+\.(t\d{1,18}-[0-9a-f]{8})(?:\.(r\d{1,9}))?\.safetensors")
"""The end of the key of a delta or a jump: its groups are the writer's name, and the name of the part."""

_NUMBER = r"\d{8,18}"  # a version or a term; 18 digits always fit into a `Count`
_LAST_TERM = 10**18 - 1
_HEAD = re.compile(rf".*/heads/({_NUMBER})\.([0-9a-f]{{32}})\.json")
_STATE = re.compile(rf".*/state/({_NUMBER})\.{_NUMBER}\.t[^/]*\.json")
_LOG = re.compile(rf".*/log/({_NUMBER})\.([0-9a-f]{{32}})\.(\d{{8,12}})(?:-(\d{{8,12}}))?\.jsonl\.zst")
_TAG = re.compile(rf".*/tags/({TAG_NAME})\.json")
_PART = re.compile(
    rf".*/(anchors|deltas|jumps|manifests)/(?:{_NUMBER}-)?({_NUMBER})\.t(\d{{1,18}})-([0-9a-f]{{8}})[./].*"
)


class Writer(NamedTuple):
    """A trainer that opened the run. The writer with the highest term, then the highest id, owns the run.

    Two trainers that start at the same moment may get the same term, but never the same keys.
    """

    term: int  # one more than the highest term found
    id: str  # 32 random hex digits

    @classmethod
    def after(cls, others: list[Writer]) -> Self:
        """A new writer with a higher term than all `others`. Raises `ProtocolError` if no term is left."""
        last = max(others, default=cls(0, ""))
        if last.term >= _LAST_TERM:
            fix = f"delete heads/{last.term:08d}.{last.id}.json of the run, or start another run"
            raise ProtocolError(f"a HEAD claims this run with the largest possible term, {last.term}: {fix}")
        return cls(last.term + 1, uuid4().hex)

    def __str__(self) -> str:
        return f"t{self.term}-{self.id[:8]}"


class LogKey(NamedTuple):
    """What the key of an object of the log says: the trainer, and which of its flushes the object holds."""

    writer: Writer
    first: int
    last: int


class Keys:
    """The keys of one run's objects. Each method returns the key of the object that it describes."""

    def __init__(self, run: str) -> None:
        if not re.fullmatch(RUN_NAME, run):
            rule = "use at most 96 letters, digits, '.', '_' and '-', and begin with a letter or digit"
            raise ProtocolError(f"{run!r} is not a run name: {rule}")
        self.run = run
        self.folder = f"runs/{run}/"
        self.heads = f"{self.folder}heads/"
        self.manifests = f"{self.folder}manifests/"
        self.states = f"{self.folder}state/"
        self.tags = f"{self.folder}tags/"
        self.info = f"{self.folder}run.json"
        self.page = f"{self.folder}README.md"
        self.log = f"{self.folder}log/"

    def head(self, writer: Writer) -> str:
        """The HEAD of a writer. No other writer uses this key."""
        return f"{self.heads}{writer.term:08d}.{writer.id}.json"

    def anchor(self, version: int, writer: Writer, name: str) -> str:
        """One file of an anchor."""
        return f"{self.folder}anchors/{version:08d}.{writer}/{name}"

    def delta(self, version: int, writer: Writer, part: str = "") -> str:
        """The delta from `version - 1` to `version`, or its `part`, such as ".r2"."""
        return f"{self.folder}deltas/{version:08d}.{writer}{part}.safetensors"

    def jump(self, base: int, version: int, writer: Writer, part: str = "") -> str:
        """The jump from `base` to `version`, or its `part`."""
        return f"{self.folder}jumps/{base:08d}-{version:08d}.{writer}{part}.safetensors"

    def manifest(self, version: int, writer: Writer) -> str:
        """The manifest of a version."""
        return f"{self.manifests}{version:08d}.{writer}.json"

    def state(self, version: int, sync: int, writer: Writer) -> str:
        """Folder of the trainer state at `version` and `sync`. Adding `.json` gives the key of its record."""
        return f"{self.states}{version:08d}.{sync:08d}.{writer}"

    def tag(self, name: str) -> str:
        """A tag. Raises `ConfigError` if `name` cannot be one."""
        if not re.fullmatch(TAG_NAME, name):
            rule = "use at most 64 letters, digits, '.', '_' and '-', and begin with a letter"
            raise ConfigError(f"{name!r} is not a tag: {rule}")
        return f"{self.tags}{name}.json"

    def log_part(self, part: LogKey) -> str:
        """One flush or segment of a trainer's log."""
        last = f"-{part.last:08d}" if part.last > part.first else ""
        return f"{self.log}{part.writer.term:08d}.{part.writer.id}.{part.first:08d}{last}.jsonl.zst"


class VersionKey(NamedTuple):
    """What the key of a version's file says. These tuples sort by writer, then by version."""

    term: int
    id: str  # the first 8 digits of the writer's id
    version: int
    kind: str  # anchors, deltas, jumps or manifests

    def written_by(self, writer: Writer) -> bool:
        """Whether `writer` wrote the file."""
        return (self.term, self.id) == (writer.term, writer.id[:8])


def version_key(key: str) -> VersionKey | None:
    """Parse the key of a file of a version. None for any other key."""
    match = _PART.fullmatch(key)
    return VersionKey(int(match[3]), match[4], int(match[2]), match[1]) if match else None


def state_version(key: str) -> int | None:
    """The version of a trainer state, from the key of its record. None for any other key."""
    return int(match[1]) if (match := _STATE.fullmatch(key)) else None


def tag_name(key: str) -> str | None:
    """The name of a tag, from its key. None for any other key."""
    return match[1] if (match := _TAG.fullmatch(key)) else None


def log_key(key: str) -> LogKey | None:
    """Parse the key of an object of the log. None for any other key."""
    if not (match := _LOG.fullmatch(key)):
        return None
    first = int(match[3])
    last = int(match[4] or first)
    if not first <= last < first + LOG_FLUSHES:
        return None
    return LogKey(Writer(int(match[1]), match[2]), first, last)


def head_writer(key: str) -> Writer | None:
    """The writer whose HEAD has this key. None for any other key."""
    return Writer(int(match[1]), match[2]) if (match := _HEAD.fullmatch(key)) else None
