"""How records name the objects of a run: files, deltas and jumps with their parts, and anchors."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Self

from pydantic import FailFast, Field, model_validator

from delta_weight_sync.checkpoint import ADAPTER
from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.records.fields import Count, Key, Record, Sha256
from delta_weight_sync.records.keys import LINK
from delta_weight_sync.records.limits import MAX_ASSETS, MAX_PARTS, MAX_REFS
from delta_weight_sync.store import file_sha256


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


Deltas = Annotated[tuple[DeltaRef, ...], Field(max_length=MAX_REFS), FailFast()]


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
    In a run that publishes an adapter, the files are `adapter_config.json` and `adapter_model.safetensors`.
    """

    version: Count
    files: Annotated[tuple[FileRef, ...], Field(min_length=1, max_length=MAX_ASSETS)]

    @property
    def weights(self) -> tuple[FileRef, ...]:
        """The files that hold weights."""
        return tuple(file for file in self.files if file.name.endswith(".safetensors"))

    @property
    def is_adapter(self) -> bool:
        """Whether the run publishes an adapter, not a whole model."""
        return any(file.name == ADAPTER for file in self.files)

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


def part_suffix(delta: DeltaRef) -> str:
    """The suffix of a part's key that names the rank, such as ".r2"; "" for a delta in one file."""
    match = LINK.search(delta.key)
    return f".{match[2]}" if match and match[2] else ""
