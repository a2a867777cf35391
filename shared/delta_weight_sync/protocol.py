"""Versions, manifests, HEAD and key names: the JSON that makes a weight version real.

A run is a folder of the bucket. Every object but HEAD and the newest log segment is written once:

    runs/<run>/run.json                               what the run is, for people and dashboards
    runs/<run>/anchors/00000000.t1/<file>             a whole Hugging Face checkpoint
    runs/<run>/deltas/00000001.t1.safetensors         what changed from version 0 to version 1
    runs/<run>/manifests/00000001.t1.json             how to build version 1, and the digest that proves it
    runs/<run>/log/00000000.jsonl                     what happened (see `runlog`)
    runs/<run>/HEAD                                   the newest version; the only name that is overwritten

Trust flows one way: HEAD names the manifest by sha256, the manifest names every file by sha256. The
writer's term is part of each key, so that a writer that was replaced can never overwrite its successor.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from delta_weight_sync.errors import DeltaWeightSyncError

FORMAT: Final = "delta-weight-sync/1"
MAX_JSON_BYTES = 8 << 20
MAX_CHAIN: Final = 128  # deltas after an anchor; bounds what a manifest lists and a joining replica fetches
POLL_S: Final = 1.0  # how often a replica looks at HEAD

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Key = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,500}$")]
RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Model = TypeVar("Model", bound="Record")


class ProtocolError(DeltaWeightSyncError, ValueError):
    """An object of the bucket is not what the protocol allows; the message names the object and why."""


class Record(BaseModel):
    """Base of every stored record: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """JSON, UTF-8, one line."""
        return self.model_dump_json().encode()


class FileRef(Record):
    """One object of the bucket, pinned by content."""

    key: Key
    size: Count
    sha256: Sha256

    @model_validator(mode="after")
    def _no_parent_folder(self) -> Self:
        if ".." in self.key.split("/") or "//" in self.key:
            raise ValueError(f"key {self.key!r} leaves its folder")
        return self

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rsplit("/", 1)[-1]

    def check(self, data: bytes) -> None:
        """Raise `ProtocolError` unless `data` is the object that this reference pins."""
        if len(data) != self.size or hashlib.sha256(data).hexdigest() != self.sha256:
            raise self.damaged()

    def damaged(self) -> ProtocolError:
        """The error for an object whose bytes are not those that were published."""
        return ProtocolError(
            f"{self.key} is not the published object (sha256 or size differs); it was not applied"
        )


class DeltaRef(FileRef):
    """A delta file: turns version `version - 1` into `version`."""

    version: Annotated[int, Field(ge=1)]
    changed: Count


class AnchorRef(Record):
    """A whole checkpoint: `config.json`, the tokenizer's files and `model.safetensors`."""

    version: Count
    files: Annotated[tuple[FileRef, ...], Field(min_length=1)]


class Manifest(Record):
    """How to build one version, and how to know that it was built.

    `deltas` is contiguous and ends at `version`; it reaches back to `anchor.version` at least, and to the
    anchor before it where there is one, so that a replica which is a little behind needs no anchor.
    """

    format: Literal["delta-weight-sync/1"] = FORMAT
    run: RunName
    version: Count
    writer_term: Count
    sync: Count  # the trainer's own count of weight syncs whose weights this version holds
    created_at: float  # unix seconds at which the trainer handed the weights over
    digest: Digest
    anchor: AnchorRef
    deltas: tuple[DeltaRef, ...]
    parent: FileRef | None  # the manifest of version - 1
    changed: Count  # elements that differ from version - 1
    total: Count  # elements of the model
    full_bytes: Count  # bytes of all weights in bf16

    @model_validator(mode="after")
    def _chain_is_whole(self) -> Self:
        versions = [d.version for d in self.deltas]
        if versions != list(range(self.version - len(versions) + 1, self.version + 1)):
            raise ValueError(f"deltas {versions} do not lead to version {self.version} without a gap")
        if self.version - len(versions) > self.anchor.version or self.anchor.version > self.version:
            raise ValueError(f"deltas {versions} do not start at anchor {self.anchor.version}")
        if (self.parent is None) != (self.version == 0):
            raise ValueError("exactly version 0 has no parent")
        return self

    def deltas_after(self, version: int) -> tuple[DeltaRef, ...] | None:
        """The deltas that lead from `version` to this one, or None where only the anchor does."""
        if not self.version - len(self.deltas) <= version <= self.version:
            return None
        return tuple(d for d in self.deltas if d.version > version)

    @property
    def sparsity(self) -> float:
        """Share of elements that kept their bits, 0 to 1."""
        return 1.0 - self.changed / self.total if self.total else 1.0


class Head(Record):
    """The one overwritten object: the newest version and who may write the next one.

    Nothing names HEAD by hash, so it carries one of itself: `seal` is the sha256 of its other fields.
    """

    format: Literal["delta-weight-sync/1"] = FORMAT
    run: RunName
    version: Count
    manifest: FileRef
    writer_term: Count
    writer: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    seal: Sha256 | Literal[""] = ""  # computed where it is not given

    @model_validator(mode="after")
    def _seal(self) -> Self:
        seal = hashlib.sha256(self.model_dump_json(exclude={"seal"}).encode()).hexdigest()
        if self.seal not in ("", seal):
            raise ValueError("seal does not fit the other fields: the object is damaged")
        object.__setattr__(self, "seal", seal)
        return self


class RunInfo(Record):
    """What a run is; written once, when it is created."""

    format: Literal["delta-weight-sync/1"] = FORMAT
    run: RunName
    model: str
    created_at: float
    full_bytes: Count


def parse(kind: type[Model], data: bytes, key: str) -> Model:
    """Read a record; raises `ProtocolError` naming `key` and the first thing wrong with it."""
    if len(data) > MAX_JSON_BYTES:
        raise ProtocolError(f"{key} is {len(data)} bytes; a {kind.__name__} has at most {MAX_JSON_BYTES}")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"{key} is not a valid {kind.__name__}: {where} {first['msg']}") from None


class Keys:
    """The key names of one run."""

    def __init__(self, run: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", run):
            raise ProtocolError(f"run name {run!r} may hold letters, digits, '.', '_' and '-' only")
        self.run = run
        self.folder = f"runs/{run}/"
        self.head = f"{self.folder}HEAD"
        self.info = f"{self.folder}run.json"
        self.log = f"{self.folder}log/"

    def anchor(self, version: int, writer_term: int, name: str) -> str:
        """Key of one file of an anchor."""
        return f"{self.folder}anchors/{version:08d}.t{writer_term}/{name}"

    def delta(self, version: int, writer_term: int) -> str:
        """Key of the delta that leads to `version`."""
        return f"{self.folder}deltas/{version:08d}.t{writer_term}.safetensors"

    def manifest(self, version: int, writer_term: int) -> str:
        """Key of a version's manifest."""
        return f"{self.folder}manifests/{version:08d}.t{writer_term}.json"

    def segment(self, number: int) -> str:
        """Key of one segment of the run's log."""
        return f"{self.log}{number:08d}.jsonl"
