"""What doctor's checks look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo

from trainer.deploy import account, hub
from trainer.deploy.account import Who
from trainer.deploy.errors import explained


class Problem(Exception):  # noqa: N818 - it is a finding, not a fault of the program
    """A check found something wrong: one sentence that names the fix."""


@dataclass(frozen=True)
class Scene:
    """Where the checks look. `owner` may be empty: whoever the token belongs to."""

    api: HfApi
    owner: str
    name: str
    model: str  # a Hub id or the folder of a checkpoint
    hardware: str
    space_token: str  # SPACE_HF_TOKEN; may be empty

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not be said."""
        return (self.space_token,)

    @cached_property
    def who(self) -> Who:
        """Whom the token belongs to; asked once, as the Hub limits how often."""
        return account.who(self.api)

    @property
    def whose(self) -> str:
        """The owner of bucket and Spaces."""
        return self.owner or str(self.who["name"])

    @cached_property
    def spaces(self) -> list[hub.Found]:
        """The Spaces of the deployment, none if there is no deployment yet."""
        return hub.spaces_of(self.api, self.whose, self.name)

    @cached_property
    def model_info(self) -> ModelInfo | None:
        """What the Hub knows of the model; None for a local folder."""
        if Path(self.model).is_dir():
            return None
        with explained(f"looking for the model {self.model}"):
            try:
                return self.api.model_info(self.model)
            except RepositoryNotFoundError:
                raise Problem(
                    f"there is no model {self.model}, or this token may not see it; check --model"
                ) from None

    @cached_property
    def weights(self) -> int:
        """How many weights the model has."""
        if (info := self.model_info) is None:
            return _weights_in(Path(self.model))
        if info.safetensors is None:
            raise Problem(
                f"the Hub does not say how large {self.model} is; use a model with safetensors files"
            )
        return info.safetensors.total


Check = Callable[[Scene], str]  # what is fine, or raises Problem


def _weights_in(folder: Path) -> int:
    """Elements of all tensors in a folder's safetensors files."""
    headers = [_header(file) for file in folder.glob("*.safetensors")]
    if not headers:
        raise Problem(f"{folder} has no safetensors files; name the folder of a checkpoint with --model")
    shapes = [
        entry["shape"] for header in headers for name, entry in header.items() if name != "__metadata__"
    ]
    return sum(_product(shape) for shape in shapes)


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    """The table of contents at the start of a safetensors file."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, dict[str, list[int]]] = json.loads(opened.read(size))
        return header


def _product(shape: list[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
