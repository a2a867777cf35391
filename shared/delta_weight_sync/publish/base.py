"""The checkpoint that a run starts from: what its versions hold besides the weights that are handed over."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from delta_weight_sync.checkpoint import Bits, CheckpointError, read_tensors, shapes_in
from delta_weight_sync.codec import CodecError
from delta_weight_sync.publish.run_writer import RunWriter
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store import ObjectMissing

Shapes = Mapping[str, tuple[int, ...]]
_log = logging.getLogger("delta_weight_sync")
_WEIGHTS = "model*.safetensors"
_HEAD = "lm_head.weight"
# Of the files beside the weights those that a server reads: config, tokenizer, chat template, processors.
_FILES = (
    "config.json",
    "generation_config.json",
    "*token*",
    "vocab*",
    "merges.txt",
    "spiece.model",
    "chat_template*",
    "*processor*.json",
)


class Base:
    """A Hugging Face checkpoint, a folder or the id of a model on the Hub; its weights may be missing."""

    def __init__(self, source: str | Path) -> None:
        """Raises `CheckpointError` for what is neither."""
        self.folder = Path(source) if Path(source).is_dir() else _download(str(source))
        self.name = self.folder.resolve().name if Path(source).is_dir() else str(source)
        if not (self.folder / "config.json").is_file():
            raise CheckpointError(
                f"{self.name} holds no config.json; name the folder of a checkpoint as base"
            )

    def write_files(self, folder: Path) -> None:
        """Copy what stands beside the weights; the config says bfloat16, as the published weights are."""
        for pattern in _FILES:
            for path in self.folder.glob(pattern):
                if path.is_file() and path.suffix not in (".py", ".safetensors"):
                    shutil.copyfile(path, folder / path.name)
        (folder / "config.json").write_text(json.dumps(_in_bf16(self._config()), indent=2))

    def rest(self, given: Shapes) -> Iterator[tuple[str, Bits]]:
        """The tensors that were not handed over, since they are not trained; `given`: those that were.

        Whether there are any is told by the number of elements, because a trainer may know the parameters by
        other names than the checkpoint; where both differ, nobody can tell: `CheckpointError`.
        """
        stored = self._shapes(given)
        missing = stored.keys() - given.keys()
        if not missing or _elements(given) >= _elements(stored):
            return
        if strange := given.keys() - stored.keys():
            raise CheckpointError(
                f"{min(missing)} was not handed over, and {min(strange)} is not in {self.name}: give as base"
                " the checkpoint that the policy was loaded from, or hand over every parameter"
            )
        for path in self._weights():
            yield from read_tensors(path, missing & shapes_in(path).keys())

    def _weights(self) -> list[Path]:
        return sorted(self.folder.glob(_WEIGHTS))

    def _shapes(self, given: Shapes) -> Shapes:
        """What is stored, without a head that is the embedding and yet stored, as in some checkpoints."""
        stored = {name: shape for path in self._weights() for name, shape in shapes_in(path).items()}
        config = self._config()
        tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings"))
        if tied and _HEAD not in given:
            stored.pop(_HEAD, None)
        return stored

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return config


def published_weights(writer: RunWriter, folder: Path) -> dict[str, Bits]:
    """The weights of the newest version, in `folder` too; none before the first, or if they are damaged.

    Then what is handed over first is published as a whole, and the run goes on.
    """
    try:
        return writer.resume(folder) or {}
    except (ProtocolError, CodecError, ObjectMissing, SafetensorError) as error:
        _log.warning("the newest version cannot be rebuilt, the next one will be an anchor: %s", error)
        return {}


def _download(model: str) -> Path:
    """The model in the local cache of the Hub, where whoever trains it has it already."""
    try:
        return Path(snapshot_download(model, allow_patterns=[*_FILES, _WEIGHTS]))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"base {model!r} is neither a folder nor a model of the Hub that can be read here: {reason}"
        ) from error


def _in_bf16(config: dict[str, Any]) -> dict[str, Any]:
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for part in parts:
        if part is config or {"dtype", "torch_dtype"} & part.keys():
            part.pop("torch_dtype", None)
            part["dtype"] = "bfloat16"
    return config


def _elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))
