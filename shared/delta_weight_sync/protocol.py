"""Versions, manifests and HEAD: the JSON that makes a weight version real.

A run is a folder of the bucket. Every object but a HEAD and the newest log segment is written once:

    runs/<run>/run.json                               what the run is, for people and dashboards
    runs/<run>/anchors/00000000.t1-5ad0b5d1/<file>    a whole Hugging Face checkpoint
    runs/<run>/deltas/00000001.t1-5ad0b5d1.safetensors   what changed from version 0 to version 1
    runs/<run>/jumps/00000000-00000008.t1-5ad0b5d1.safetensors   the same over several versions
    runs/<run>/manifests/00000001.t1-5ad0b5d1.json    how to build version 1, and the digest that proves it
    runs/<run>/log/00000000.jsonl                     what happened (see `runlog`)
    runs/<run>/heads/00000001.<writer>.json           a writer's HEAD: its newest version; the last counts

Trust flows one way: HEAD names the manifest by sha256, the manifest names every file by sha256. Each
writer has a HEAD and names of its own, so that one that was replaced can never overwrite its successor.

A manifest decides: what it says of its version is never said otherwise. HEAD only tells where the newest
one is, and where it is torn, deleted, old or somebody else's, that is found from the manifests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import FailFast, Field, StringConstraints, ValidationError, model_validator

from delta_weight_sync.refs import (
    AnchorRef,
    Count,
    DeltaRef,
    FileRef,
    ProtocolError,
    Record,
    Sha256,
    Time,
    Word,
)
from delta_weight_sync.ways import Way, cheapest

FORMAT: Final = "delta-weight-sync/2"
MAX_JSON_BYTES = 8 << 20
POLL_S: Final = 1.0  # how often a replica looks at HEAD

RUN_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
RunName = Annotated[str, StringConstraints(pattern=f"^{RUN_NAME}$")]
Deltas = Annotated[tuple[DeltaRef, ...], Field(max_length=1024), FailFast()]  # `ways` names far fewer
WriterId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Model = TypeVar("Model", bound="Record")
Rank = tuple[float, int, str, int]
"""Which of two versions is the newer one: when the run was created, its writer (term and id), the version."""


class Sealed(Record):
    """A record of a run that holds a hash of itself: damage is seen also where nothing names it by hash.

    `seal` is the sha256 of the record's kind, a line feed, and its JSON without `seal` and `signature`.
    """

    format: Literal["delta-weight-sync/2"] = FORMAT
    run: RunName
    seal: Sha256 | Literal[""] = ""  # computed where it is not given
    signature: Annotated[str, StringConstraints(max_length=1024)] = ""

    @model_validator(mode="after")
    def _seal(self) -> Self:
        content = f"{type(self).__name__}\n{self.model_dump_json(exclude={'seal', 'signature'})}"
        seal = hashlib.sha256(content.encode()).hexdigest()
        if self.seal not in ("", seal):
            raise ValueError("seal does not fit the other fields: the object is damaged")
        object.__setattr__(self, "seal", seal)
        return self


class Manifest(Sealed):
    """How to build one version, and how to know that it was built.

    `deltas` has one of each version, without a gap up to `version`: the newest ones, for replicas that are a
    little behind, and what the way from the anchor takes. `jumps` shorten it; see `way`.
    """

    born: Time  # unix seconds at which the run was created: one that is started over is another run
    version: Count
    writer_term: Count
    writer: WriterId
    sync: Count  # the trainer's own count of weight syncs whose weights this version holds
    created_at: Time  # unix seconds at which the trainer handed the weights over
    digest: Digest
    anchor: AnchorRef
    deltas: Deltas
    jumps: Deltas
    parent: FileRef | None  # the manifest of version - 1
    changed: Count  # elements that differ from version - 1
    total: Count  # elements of the model
    full_bytes: Count  # bytes of all weights in bf16

    @model_validator(mode="after")
    def _chain_is_whole(self) -> Self:
        first = self.version - len(self.deltas)
        if [(d.base, d.version) for d in self.deltas] != [(v, v + 1) for v in range(first, self.version)]:
            raise ValueError(f"deltas do not lead to version {self.version} one by one, without a gap")
        if self._way(None) is None:
            raise ValueError(f"nothing leads from anchor {self.anchor.version} to version {self.version}")
        if (self.parent is None) != (self.version == 0):
            raise ValueError("exactly version 0 has no parent")
        return self

    def way(self, held: int | None = None) -> Way:
        """What to fetch for this version, the fewest bytes: from nothing, or with version `held` at hand.

        That must be a version of this history; a digest tells it in the end.
        """
        way = self._way(held)
        assert way is not None, "the anchor leads here"
        return way

    def way_without(self, unreadable: Container[str], held: int | None = None) -> Way | None:
        """As `way`, by none of the files with these keys; None where no other way leads here."""
        deltas = [delta for delta in (*self.deltas, *self.jumps) if delta.key not in unreadable]
        whole = not any(file.key in unreadable for file in self.anchor.files)
        return cheapest(self.anchor if whole else None, deltas, self.version, held)

    def _way(self, held: int | None) -> Way | None:
        return self.way_without((), held)

    def named(self) -> tuple[FileRef, ...]:
        """All files that it names."""
        return (*self.anchor.files, *self.deltas, *self.jumps)

    @property
    def rank(self) -> Rank:
        """See `Rank`."""
        return self.born, self.writer_term, self.writer, self.version

    @property
    def sparsity(self) -> float:
        """Share of elements that kept their bits, 0 to 1."""
        return 1.0 - self.changed / self.total if self.total else 1.0


class Head(Sealed):
    """Where a writer's newest version is; before its first one, the version that it goes on from."""

    born: Time  # as in the manifest
    version: Count | None  # None before the run's first version
    manifest: FileRef | None
    writer_term: Count
    writer: WriterId

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.version is None) != (self.manifest is None):
            raise ValueError("a version has a manifest")
        return self

    @property
    def rank(self) -> Rank:
        """See `Rank`; before the first version it is that of version -1."""
        return self.born, self.writer_term, self.writer, -1 if self.version is None else self.version


class RunInfo(Record):
    """What a run is; written once, when it is created."""

    format: Literal["delta-weight-sync/2"] = FORMAT
    run: RunName
    model: Word
    created_at: Time
    full_bytes: Count


def reference(key: str, record: Record) -> FileRef:
    """What pins the stored record."""
    data = record.to_bytes()
    return FileRef(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest())


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
