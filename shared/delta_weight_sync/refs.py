"""References to objects of the bucket, each pinned by its content."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from delta_weight_sync.errors import DeltaWeightSyncError

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Key = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,500}$")]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
MAX_ASSETS: Final = 256  # files of a checkpoint
LARGEST: Final = 1e15  # of a number that is measured, in any unit
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Time = Annotated[float, Field(ge=0, lt=253_402_300_800)]  # unix seconds, up to the year 9999


def _cut(characters: int) -> BeforeValidator:
    """What people wrote or a program said is shortened, not refused; half a character of UTF-16 is "?"."""

    def cut(text: Any) -> Any:
        return text[:characters].encode(errors="replace").decode() if isinstance(text, str) else text

    return BeforeValidator(cut)


Word = Annotated[str, _cut(200)]  # a name
Line = Annotated[str, _cut(4000)]  # a sentence or a few
Text = Annotated[str, _cut(20_000)]  # a prompt


class ProtocolError(DeltaWeightSyncError, ValueError):
    """An object of the bucket is not what the protocol allows; the message names the object and why."""


class Record(BaseModel):
    """Base of every stored record: immutable, numbers are finite, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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

    def is_in(self, path: Path) -> bool:
        """Whether a file on this machine's disk is the object that this reference pins."""
        if path.stat().st_size != self.size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256

    def damaged(self) -> ProtocolError:
        """The error for an object whose bytes are not those that were published."""
        return ProtocolError(
            f"{self.key} is not the published object (sha256 or size differs); it was not applied"
        )


class DeltaRef(FileRef):
    """A delta file: turns version `base` into `version`. One over several versions is called a jump."""

    base: Count
    version: Count
    changed: Count  # elements that differ

    @model_validator(mode="after")
    def _leads_forward(self) -> Self:
        if self.base >= self.version:
            raise ValueError(f"{self.key} leads from version {self.base} back to {self.version}")
        return self


class AnchorRef(Record):
    """A whole checkpoint: `config.json`, the tokenizer's files and `model.safetensors`."""

    version: Count
    files: Annotated[tuple[FileRef, ...], Field(min_length=1, max_length=MAX_ASSETS)]

    def small_first(self) -> list[FileRef]:
        """The order in which to fetch them: a small one that is damaged is found before the weights come."""
        return sorted(self.files, key=lambda file: file.size)

    @model_validator(mode="after")
    def _one_of_each_name(self) -> Self:
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("two files of the anchor have one name")
        return self
