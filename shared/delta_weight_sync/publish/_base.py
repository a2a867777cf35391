"""The checkpoint that a run starts from: the files and the untrained tensors that its versions also hold."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from delta_weight_sync.checkpoint import Bits, read_tensors, shapes_in
from delta_weight_sync.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
_WEIGHTS = "model*.safetensors"
_HEAD = "lm_head.weight"
# What a server reads besides the weights: config, tokenizer, chat template, processors.
_FILES = (
    *("config.json", "generation_config.json", "*token*", "vocab*", "merges.txt", "spiece.model"),
    *("chat_template*", "*processor*.json"),
)


class Base:
    """A Hugging Face checkpoint: a folder or the id of a model on the Hub. Its weights may be missing."""

    def __init__(self, source: str | Path) -> None:
        """Find the checkpoint; raises `CheckpointError`."""
        try:  # a trainer that loaded a model has it in the Hub's local cache already
            given = Path(source) if Path(source).is_dir() else None
            self.folder = given or Path(snapshot_download(str(source), allow_patterns=[*_FILES, _WEIGHTS]))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"base {str(source)!r} is neither a folder nor a model of the Hub that can be read here:"
                f" {str(error).splitlines()[0]}"
            ) from error
        self.name = given.resolve().name if given else str(source)
        if not (self.folder / "config.json").is_file():
            raise CheckpointError(
                f"{self.name} holds no config.json; name the folder of a checkpoint as base"
            )
        self._config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())

    def write_files(self, folder: Path) -> None:
        """Copy the files a server needs; the config says bfloat16, the dtype of published weights."""
        for pattern in _FILES:
            for path in self.folder.glob(pattern):
                if path.is_file() and path.suffix not in (".py", ".safetensors"):
                    shutil.copyfile(path, folder / path.name)
        config = self._config
        for part in (config, *(part for part in config.values() if isinstance(part, dict))):
            if part is config or {"dtype", "torch_dtype"} & part.keys():
                part.pop("torch_dtype", None)
                part["dtype"] = "bfloat16"
        (folder / "config.json").write_text(json.dumps(config, indent=2))

    def untrained(self, trained: Shapes) -> Iterator[tuple[str, Bits]]:
        """The checkpoint's tensors that the trainer does not publish itself.

        A trainer may use other parameter names than the checkpoint, so the number of elements decides whether
        any are missing. Raises `CheckpointError` if both names and numbers differ.
        """
        paths = sorted(self.folder.glob(_WEIGHTS))
        stored = {name: shape for path in paths for name, shape in shapes_in(path).items()}
        config = self._config
        tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings"))
        if tied and _HEAD not in trained:  # some checkpoints store a head that is the embedding
            stored.pop(_HEAD, None)
        missing = stored.keys() - trained.keys()
        if not missing or sum(map(math.prod, trained.values())) >= sum(map(math.prod, stored.values())):
            return
        if strange := trained.keys() - stored.keys():
            raise CheckpointError(
                f"{min(missing)} was not published, and {min(strange)} is not in {self.name}: give as base"
                " the checkpoint that the policy was loaded from, or publish every parameter"
            )
        for path in paths:
            yield from read_tensors(path, missing & shapes_in(path).keys())
