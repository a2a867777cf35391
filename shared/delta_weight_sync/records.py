"""Versions, manifests, HEAD and their keys: the records of a run in its bucket.

A run is a folder of the bucket (docs/wire-format.md). An anchor is a whole checkpoint. A delta leads from one
version to the next, and a jump is a delta over several versions. Every object is written once, except HEADs.
A HEAD names a manifest by sha256, and the manifest names every file by
sha256. Each writer uses keys of its own for HEAD, versions and states, so a replaced trainer cannot overwrite
objects of its successor. The HEAD of the last writer counts (see `Writer`). If that HEAD is truncated,
missing, stale or copied from another writer, readers find the newest version by listing the manifests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable, Sequence
from itertools import chain, groupby
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeVar
from uuid import uuid4

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    field_serializer,
    model_validator,
)

from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.store import file_sha256

FORMAT: Final = "delta-weight-sync/3"
POLL_S: Final = 1.0  # usual seconds between two requests for HEAD, without the Hub's events
MAX_ASSETS: Final = 1024  # max files of an anchor
MAX_PARTS: Final = 64  # max parts of a delta that a trainer writes
MAX_REFS: Final = 1 << 14  # max delta files in a manifest, and max jump files
LOG_FLUSHES: Final = 512  # max flushes of a trainer in one object of the log
LARGEST: Final = 1e15  # the largest number that a log event may report, in any unit
STRIDES: Final = (8, 64)  # versions that a jump spans
ANCHOR_PAYS: Final = 0.5  # write an anchor when a join must fetch deltas of more than this share of the model
MAX_FILES: Final = 128  # write an anchor when a join needs this many deltas and jumps, however small
# A manifest names at least the deltas of the newest 64 versions. But if one of these versions was published
# whole, without a delta, the manifest names only the deltas of later versions.
WINDOW: Final = 64
RUN_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"

_NUMBER = r"\d{8,18}"  # a version or a term; 18 digits always fit into a `Count`
_LAST_TERM = 10**18 - 1
_HEAD = re.compile(rf".*/heads/({_NUMBER})\.([0-9a-f]{{32}})\.json")
_STATE = re.compile(rf".*/state/({_NUMBER})\.{_NUMBER}\.t[^/]*\.json")
_LOG = re.compile(rf".*/log/({_NUMBER})\.([0-9a-f]{{32}})\.(\d{{8,12}})(?:-(\d{{8,12}}))?\.jsonl\.zst")
_LINK = re.compile(r"(?:deltas/|jumps/\d+-)\d+\.(t\d{1,18}-[0-9a-f]{8})(?:\.(r\d{1,9}))?\.safetensors")
_WRITER_NAME = re.compile(r"t\d{1,18}-[0-9a-f]{8}")
_PART_NAME = re.compile(r"r\d{1,9}")
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


def part_suffix(delta: DeltaRef) -> str:
    """The suffix of a part's key that names the rank, such as ".r2"; "" for a delta in one file."""
    match = _LINK.search(delta.key)
    return f".{match[2]}" if match and match[2] else ""


def state_version(key: str) -> int | None:
    """The version of a trainer state, from the key of its record. None for any other key."""
    return int(match[1]) if (match := _STATE.fullmatch(key)) else None


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


def cut(length: int) -> Any:
    """Let a field cut a text or list to `length` instead of refusing it. A lone surrogate becomes "?"."""

    def shorten(value: Any) -> Any:
        if isinstance(value, str):
            return value[:length].encode(errors="replace").decode()
        return value[:length] if isinstance(value, list | tuple) else value

    return Field(max_length=length), BeforeValidator(shorten)


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
# No part between slashes is empty or begins with a dot, so no key leads out of its folder.
KEY: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$"
Key = Annotated[str, Field(pattern=KEY, max_length=501)]
RunName = Annotated[str, Field(pattern=f"^{RUN_NAME}$")]
WriterId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Time = Annotated[float, Field(ge=0, lt=253_402_300_800)]  # unix seconds, up to the year 9999
Word = Annotated[str, *cut(200)]  # a name
Line = Annotated[str, *cut(4000)]  # a few sentences
Text = Annotated[str, *cut(600)]  # the part of a conversation that is shown
Model = TypeVar("Model", bound="Record")
Rank = tuple[float, int, str, int]
"""Sorts versions from old to new, by the run's creation time, the writer's term and id, and the version."""


class Record(BaseModel):
    """Base of every stored record: immutable, with finite numbers and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """The record as JSON, one line in UTF-8."""
        return self.model_dump_json().encode()


class FileRef(Record):
    """One object of the bucket: its key, and the size and sha256 of its content."""

    key: Key
    size: Count
    sha256: Sha256

    @property
    def name(self) -> str:
        """The last part of the key; for a file of an anchor, its path in the checkpoint's folder."""
        parts = self.key.split("/", 4)
        return parts[4] if parts[2:3] == ["anchors"] and len(parts) == 5 else self.key.rsplit("/", 1)[-1]

    def check(self, data: bytes) -> None:
        """Raise `ProtocolError` unless `data` has this size and sha256."""
        if len(data) != self.size or hashlib.sha256(data).hexdigest() != self.sha256:
            raise self.damaged()

    def is_in(self, path: Path) -> bool:
        """Whether a local file has this size and sha256."""
        return path.stat().st_size == self.size and file_sha256(path) == self.sha256

    def damaged(self) -> ProtocolError:
        """The error for an object whose bytes are not the published ones."""
        return ProtocolError(
            f"{self.key} is not the published object (sha256 or size differs); it was not applied"
        )


class DeltaRef(FileRef):
    """A file of a delta or of a jump, which leads from version `base` to `version`.

    A delta or jump may have several files, its parts, which change different tensors. All parts are needed.
    So they have one hash together: the sha256 of the binary sha256s of all its files, one after another.
    `sha256` is this hash. For a delta or jump of one file, it is the sha256 of the file.
    """

    base: Count
    version: Count
    changed: Count  # words that differ, in all parts
    parts: Annotated[int, Field(ge=1, le=MAX_PARTS)] = 1


def joined(parts: Sequence[DeltaRef]) -> tuple[DeltaRef, ...]:
    """The files of one delta or jump, from references to each of them alone."""
    if len(parts) < 2:
        return tuple(parts)
    together = {
        "sha256": sha256_together(part.sha256 for part in parts),
        "changed": sum(part.changed for part in parts),
        "parts": len(parts),
    }
    return tuple(part.model_copy(update=together) for part in parts)


def sha256_together(hashes: Iterable[str]) -> str:
    """The hash of the parts of one delta or jump, from the sha256 of each in hex."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, hashes))).hexdigest()


class AnchorRef(Record):
    """A whole checkpoint: `config.json`, the tokenizer's files and the weights.

    The weights are `model.safetensors`, or shards such as `model-00001-of-00004.safetensors` with an index.
    """

    version: Count
    files: Annotated[tuple[FileRef, ...], Field(min_length=1, max_length=MAX_ASSETS)]

    @property
    def weights(self) -> tuple[FileRef, ...]:
        """The files that hold weights."""
        return tuple(file for file in self.files if file.name.endswith(".safetensors"))

    @property
    def small(self) -> tuple[FileRef, ...]:
        """The other files: config, tokenizer, index."""
        return tuple(file for file in self.files if not file.name.endswith(".safetensors"))

    @model_validator(mode="after")
    def _one_of_each_name(self) -> Self:
        names = {file.name for file in self.files}
        if len(names) < len(self.files):
            raise ValueError("two files of the anchor have the same name")
        if any(str(folder) in names for name in names for folder in PurePosixPath(name).parents):
            raise ValueError("a file of the anchor has the name of a folder")
        return self


Deltas = Annotated[tuple[DeltaRef, ...], Field(max_length=MAX_REFS), FailFast()]


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

    @field_serializer("anchor")
    def _short_anchor(self, anchor: AnchorRef) -> dict[str, Any]:
        folder = f"{Keys(self.run).folder}anchors/"
        usual = f"{anchor.version:08d}.{self._writer_name}"
        rows = []
        for file in anchor.files:
            place, _, name = file.key.removeprefix(folder).partition("/")
            rows.append([name, file.size, file.sha256, *([place] if place != usual else [])])
        return {"version": anchor.version, "files": rows}

    @field_serializer("deltas", "jumps")
    def _short_links(self, links: tuple[DeltaRef, ...]) -> list[list[Any]]:
        rows = []
        for (base, version), group in groupby(links, key=lambda link: (link.base, link.version)):
            parts = list(group)
            found = [_LINK.search(part.key) for part in parts]
            writers = {match[1] for match in found if match}
            if None in found or len(writers) > 1:
                raise ValueError(f"{parts[0].key} is not the key of a delta or a jump of one writer")
            sizes = {match[2]: part.size for match, part in zip(found, parts, strict=True) if match}
            size = sizes.get(None, sizes)
            other = sorted(writers - {self._writer_name})
            rows.append([base, version, parts[0].changed, size, parts[0].sha256, *other])
        return rows

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
        found["anchor"] = _full_anchor(data.get("anchor"), keys, writer)
        for field in ("deltas", "jumps"):
            found[field] = _full_links(data.get(field), f"{keys.folder}{field}/", writer)
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


def _full_anchor(anchor: Any, keys: Keys, writer: str) -> dict[str, Any]:
    """The anchor of a manifest in JSON, with the keys of its files."""
    rows = anchor.get("files") if isinstance(anchor, dict) else None
    if not isinstance(rows, list):
        raise ValueError("the anchor is not {version, files}")
    files = []
    for row in rows[: MAX_ASSETS + 1]:
        texts = [row[0], *row[3:]] if isinstance(row, list) and len(row) in (3, 4) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a file of the anchor is {str(row)[:100]}, not [name, size, sha256]")
        folder = row[3] if len(row) == 4 else f"{anchor.get('version')!s:0>8}.{writer}"
        files.append({"key": f"{keys.folder}anchors/{folder}/{row[0]}", "size": row[1], "sha256": row[2]})
    return {**anchor, "files": files}


def _full_links(rows: Any, folder: str, writer: str) -> list[dict[str, Any]]:
    """The deltas or jumps of a manifest in JSON as one object for each file."""
    if not isinstance(rows, list):
        raise ValueError(f"{folder} is not a list")
    full: list[dict[str, Any]] = []
    for row in rows:
        shown = str(row)[:100]
        if not isinstance(row, list) or len(row) not in (5, 6):
            raise ValueError(f"a delta is {shown}, not [base, version, changed, size, sha256]")
        base, version, changed, size, sha256, *other = row
        numbers = [base, version]
        if any(type(number) is not int or not 0 <= number < 10**18 for number in numbers):
            raise ValueError(f"the versions of a delta are wrong: {shown}")
        owner = other[0] if other else writer
        if not isinstance(owner, str) or not _WRITER_NAME.fullmatch(owner):
            raise ValueError(f"the writer of a delta is wrong: {shown}")
        sizes = size if isinstance(size, dict) else {"": size}
        named = all(_PART_NAME.fullmatch(part) for part in sizes if isinstance(size, dict))
        if isinstance(size, dict) and not (named and 1 <= len(size) <= MAX_PARTS):
            raise ValueError(f"the parts of a delta are not 1 to {MAX_PARTS} named sizes: {shown}")
        if len(full) + len(sizes) > MAX_REFS:
            raise ValueError(f"{folder} has more than {MAX_REFS} files")
        start = f"{base:08d}-" if folder.endswith("jumps/") else ""
        common = {"sha256": sha256, "base": base, "version": version, "changed": changed, "parts": len(sizes)}
        for part, each in sizes.items():
            name = f"{start}{version:08d}.{owner}{f'.{part}' if part else ''}.safetensors"
            full.append({"key": f"{folder}{name}", "size": each, **common})
    return full


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


class Recipe(NamedTuple):
    """The files that build a version: an anchor (None to start at your version), then deltas and jumps."""

    anchor: AnchorRef | None
    deltas: tuple[DeltaRef, ...]

    @property
    def files(self) -> tuple[FileRef, ...]:
        """All files of the recipe."""
        return (*(self.anchor.files if self.anchor else ()), *self.deltas)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def cheapest_recipe(
    anchor: AnchorRef | None, deltas: Iterable[DeltaRef], version: int, held: int | None
) -> Recipe | None:
    """The recipe with the fewest bytes; on a tie, with the fewest files. None if nothing leads to `version`.

    A recipe starts at `anchor`, or at `held`, a version that you already have. It has all parts of a delta or
    none. One pass over deltas and jumps, sorted by base, is enough, because each leads to a later version.
    """
    links: dict[tuple[int, int], list[DeltaRef]] = {}
    for delta in deltas:
        links.setdefault((delta.base, delta.version), []).append(delta)
    # version -> bytes, number of files, anchor (if any), and parts of the last delta (none at the start)
    reached: dict[int, tuple[int, int, AnchorRef | None, Sequence[DeltaRef]]] = {}
    if anchor:
        reached[anchor.version] = sum(file.size for file in anchor.files), 1, anchor, ()
    if held is not None and held <= version:
        reached[held] = 0, 0, None, ()
    for (base, end), parts in sorted(links.items(), key=lambda link: link[0][0]):
        if base in reached:
            size, files, start, _ = reached[base]
            cost, there = (size + sum(part.size for part in parts), files + len(parts)), reached.get(end)
            if there is None or cost < there[:2]:
                reached[end] = *cost, start, parts
    if version not in reached:
        return None
    way: list[Sequence[DeltaRef]] = []  # the chosen deltas, from the last to the first
    at = version
    while leading := reached[at][3]:
        way.append(leading)
        at = leading[0].base
    return Recipe(reached[version][2], tuple(chain.from_iterable(reversed(way))))


def links_for(
    anchor: AnchorRef, deltas: tuple[DeltaRef, ...], jumps: tuple[DeltaRef, ...], version: int
) -> tuple[tuple[DeltaRef, ...], tuple[DeltaRef, ...]]:
    """Choose the deltas (without a gap) and the jumps that the manifest of `version` names.

    A manifest needs the cheapest recipe from the anchor. For replicas that are a little behind, it also needs
    the deltas of the last `WINDOW` versions and the jumps that such replicas can use.
    """
    recipe = cheapest_recipe(anchor, (*deltas, *jumps), version, None)
    needed = {delta.key for delta in recipe.deltas} if recipe else set()
    first = max(0, min([version - WINDOW + 1, *(d.version for d in deltas if d.key in needed)]))
    kept = tuple(delta for delta in deltas if delta.version >= first)
    return kept, tuple(jump for jump in jumps if jump.base >= first - 1 or jump.key in needed)
