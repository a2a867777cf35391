"""The records that lead to a version: HEAD names a manifest, and the manifest names every file, by sha256."""

import hashlib
import re
from collections.abc import Container
from itertools import groupby
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_serializer, model_validator

from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.records import rows
from delta_weight_sync.records.fields import Count, Digest, Record, RunName, Sha256, Time, Word, WriterId
from delta_weight_sync.records.files import AnchorRef, DeltaRef, Deltas, FileRef
from delta_weight_sync.records.keys import RUN_NAME, TAG_NAME, Keys, Writer
from delta_weight_sync.records.recipes import Recipe, cheapest_recipe

FORMAT: Final = "delta-weight-sync/3"
Model = TypeVar("Model", bound="Record")
Rank = tuple[float, int, str, int]
"""Sorts versions from old to new, by the run's creation time, the writer's term and id, and the version."""


class Sealed(Record):
    """A record with a hash of its fields. The hash shows damage even if no other record names its sha256.

    `seal` is the sha256 of the record's kind, a line feed, and its JSON without `seal` and `signature`.
    """

    format: Literal["delta-weight-sync/3"] = FORMAT
    run: RunName
    seal: Sha256 | Literal[""] = ""  # computed if empty
    # Upper-case hex digits are refused, so that records with the same signature are equal.
    signature: Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")] = ""

    @model_validator(mode="after")
    def _seal(self) -> Self:
        content = f"{type(self).__name__}\n{self.model_dump_json(exclude={'seal', 'signature'})}"
        seal = hashlib.sha256(content.encode()).hexdigest()
        if self.seal not in ("", seal):
            raise ValueError("`seal` does not match the other fields: the object is damaged")
        object.__setattr__(self, "seal", seal)
        return self


class Manifest(Sealed):
    """How to build one version, and the digest that proves it.

    `deltas` lead to `version` one by one, without a gap; each delta is one file or several parts. Together
    with `jumps`, they lead to `version` from the anchor, and from each of the last `WINDOW` versions. But if
    one of these versions was published whole, without a delta, nothing leads from the versions before it.

    In JSON, a reader computes the keys of all these files, and the parts of a delta are one entry: see
    docs/wire-format.md.
    """

    born: Time  # unix seconds when the run was created; a run that is started over gets a new time
    version: Count
    writer_term: Count
    writer: WriterId
    sync: Count  # number of the trainer's sync whose weights this version holds
    created_at: Time  # unix seconds when the trainer handed over the weights
    digest: Digest
    anchor: AnchorRef
    deltas: Deltas
    jumps: Deltas
    parent: FileRef | None  # the manifest of version - 1
    changed: Count  # words that differ from version - 1; 0 without a delta
    total: Count  # words of the model: elements, but two for a float32 element, and four for an int64
    full_bytes: Count  # bytes of all weights

    def __repr__(self) -> str:
        changed = f"{self.changed:,} of {self.total:,} words changed" if self.version else "all words"
        what = f"version {self.version}, sync {self.sync}, {changed}, digest {self.digest}"
        return f"<Manifest of run {self.run!r}: {what}>"

    @field_serializer("anchor")
    def _short_anchor(self, anchor: AnchorRef) -> dict[str, Any]:
        usual = f"{anchor.version:08d}.{self._writer_name}"
        folder = f"{Keys(self.run).folder}anchors/"
        return {"version": anchor.version, "files": rows.anchor_rows(anchor.files, folder, usual)}

    @field_serializer("deltas", "jumps")
    def _short_links(self, links: tuple[DeltaRef, ...]) -> list[list[Any]]:
        return rows.link_rows(links, self._writer_name)

    @property
    def _writer_name(self) -> str:
        return str(Writer(self.writer_term, self.writer))

    @model_validator(mode="before")
    @classmethod
    def _with_keys(cls, data: Any, info: ValidationInfo) -> Any:
        """Compute the keys of a manifest that comes from JSON."""
        run = data.get("run") if isinstance(data, dict) else None
        if info.mode != "json" or not isinstance(run, str) or not re.fullmatch(RUN_NAME, run):
            return data  # made by a program, or refused by the field's own check
        keys = Keys(run)
        writer = f"t{data.get('writer_term')}-{str(data.get('writer'))[:8]}"
        found = dict(data)
        found["anchor"] = rows.full_anchor(data.get("anchor"), f"{keys.folder}anchors/", writer)
        for field in ("deltas", "jumps"):
            found[field] = rows.full_links(data.get(field), f"{keys.folder}{field}/", writer)
        return found

    @model_validator(mode="after")
    def _chain_is_whole(self) -> Self:
        ways = [way for way, _ in groupby(self.deltas, key=lambda d: (d.base, d.version))]
        if ways != [(v, v + 1) for v in range(self.version - len(ways), self.version)]:
            raise ValueError(f"deltas do not lead to version {self.version} one by one")
        if any(jump.version - jump.base < 2 for jump in self.jumps):
            raise ValueError("a jump spans less than two versions")
        if self.recipe_without(()) is None:
            raise ValueError(f"nothing leads from anchor {self.anchor.version} to version {self.version}")
        if (self.parent is None) != (self.version == 0):
            raise ValueError("version 0 must have no parent, and every other version must have one")
        return self

    def recipe(self, held: int | None = None) -> Recipe:
        """The files with the fewest bytes that build this version from the anchor, or from `held`, the number
        of a version that you have. Check the digest: if the run was started over, yours has other weights."""
        recipe = self.recipe_without((), held)
        assert recipe, "a manifest without a recipe is refused"
        return recipe

    def recipe_without(self, unreadable: Container[str], held: int | None = None) -> Recipe | None:
        """Like `recipe`, but without the keys in `unreadable`. None if there is no such recipe."""
        links = (*self.deltas, *self.jumps)
        broken = {(link.base, link.version) for link in links if link.key in unreadable}
        deltas = [link for link in links if (link.base, link.version) not in broken]
        whole = not any(file.key in unreadable for file in self.anchor.files)
        return cheapest_recipe(self.anchor if whole else None, deltas, self.version, held)

    @property
    def delta(self) -> tuple[DeltaRef, ...]:
        """The file of the delta to this version, or the files of its parts; empty without a delta."""
        return tuple(delta for delta in self.deltas if delta.version == self.version)

    @property
    def files(self) -> tuple[FileRef, ...]:
        """All files that the manifest names, except its parent."""
        return (*self.anchor.files, *self.deltas, *self.jumps)

    @property
    def rank(self) -> Rank:
        """The manifest's place in the order of versions."""
        return self.born, self.writer_term, self.writer, self.version

    @property
    def sparsity(self) -> float:
        """Share of words that kept their bits, 0 to 1."""
        return 1.0 - self.changed / self.total if self.total else 1.0


class Head(Sealed):
    """Names a writer's newest version. Until the writer publishes its first version, the writer's HEAD names
    the version from which the writer continues."""

    born: Time  # as in the manifest
    version: Count | None  # None before the run's first version
    manifest: FileRef | None
    writer_term: Count
    writer: WriterId

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.version is None) != (self.manifest is None):
            raise ValueError("`version` and `manifest` must both be set, or both be null")
        return self

    @property
    def rank(self) -> Rank:
        """HEAD's place in the order of versions. If HEAD names no version, the version counts as -1."""
        return self.born, self.writer_term, self.writer, -1 if self.version is None else self.version


class Tag(Sealed):
    """A name for a version, such as `best`. Its version is kept when older versions are deleted.

    Attributes:
        name: The tag, also the name of its object.
        born: Unix seconds when the run was created, as in the manifest.
        version: The number of the version.
        digest: The digest of the version's weights.
        manifest: The manifest of the version.
        created_at: Unix seconds when the tag was set.
    """

    name: Annotated[str, Field(pattern=f"^{TAG_NAME}$")]
    born: Time
    version: Count
    digest: Digest
    manifest: FileRef
    created_at: Time


class RunInfo(Record):
    """Describes a run; written once, when the run is created."""

    format: Literal["delta-weight-sync/3"] = FORMAT
    run: RunName
    model: Word
    created_at: Time
    full_bytes: Count


def reference(key: str, record: Record) -> FileRef:
    """A reference to a record, with the size and sha256 of its content."""
    data = record.to_bytes()
    return FileRef(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def parse(kind: type[Model], data: bytes, key: str) -> Model:
    """Parse a record. Raises `ProtocolError` with `key` and the first problem."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"{key} is not a valid {kind.__name__}: {where} {first['msg']}") from None
