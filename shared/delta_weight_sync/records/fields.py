"""The base class of all stored records, and the types of their fields."""

from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from delta_weight_sync.records.keys import RUN_NAME
from delta_weight_sync.records.limits import LARGEST


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


class Record(BaseModel):
    """Base of every stored record: immutable, with finite numbers and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """The record as JSON, one line in UTF-8."""
        return self.model_dump_json().encode()
