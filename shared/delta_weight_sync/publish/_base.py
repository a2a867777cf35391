"""The checkpoint that a run starts from: the files and the untrained tensors that its versions also hold."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from delta_weight_sync.checkpoint import Bits, read_tensors, shapes_in
from delta_weight_sync.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
_WEIGHTS = "model*.safetensors"
_HEAD = "lm_head.weight"
_SAME = 0.01  # a policy keeps at least this share of a tensor's elements; unrelated models share fewer
_log = logging.getLogger("delta_weight_sync")
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
        config = self.folder / "config.json"
        if not config.is_file():
            raise CheckpointError(f"{self.name} holds no config.json: name a checkpoint's folder as base")
        self._config: dict[str, Any] = json.loads(config.read_text())

    def write_files(self, folder: Path) -> None:
        """Copy the files that a server needs. The config gets bfloat16, the dtype of published weights."""
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

    def untrained(self, trained: Shapes, bits: Callable[[str], Bits]) -> Iterator[tuple[str, Bits]]:
        """The checkpoint's tensors that the trainer does not publish itself.

        Args:
            trained: Shapes of the tensors that the trainer publishes.
            bits: Returns the bits of one of these tensors.

        Raises:
            CheckpointError: The policy was not loaded from this checkpoint. Tensors may have other names than
                in the checkpoint if their number of elements, in sum, is the same.
        """
        shapes = {path: shapes_in(path) for path in sorted(self.folder.glob(_WEIGHTS))}
        stored = {name: shape for inside in shapes.values() for name, shape in inside.items()}
        if not stored:
            return
        config = self._config
        tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings"))
        if tied and _HEAD in trained:
            raise self._other(f"{_HEAD} was published, but the config of {self.name} ties it")
        if tied:  # some checkpoints store the tied head, too
            stored.pop(_HEAD, None)
        for name, shape in trained.items():
            if stored.get(name, shape) != shape:
                raise self._other(f"{name} has shape {shape}, but {stored[name]} in {self.name}")
        missing, strange = stored.keys() - trained.keys(), trained.keys() - stored.keys()
        if strange:
            if _size(trained[name] for name in strange) == _size(stored[name] for name in missing):
                return  # the same tensors under other names
            lack = f", and {min(missing)} was not published" if missing else ""
            raise self._other(f"{min(strange)} is not in {self.name}{lack}")
        if _HEAD in missing and stored[_HEAD] in trained.values():
            raise self._other(f"{_HEAD} was not published, but {self.name} does not tie it to the embedding")
        if missing:
            largest = max(trained, key=lambda name: math.prod(trained[name]))
            file = next(path for path in shapes if largest in shapes[path])
            ((_, loaded),) = read_tensors(file, [largest])
            if (loaded == bits(largest)).mean() < _SAME:
                raise self._other(f"{largest} has other values than in {self.name}")
            few = ", ".join(sorted(missing)[:3]) + (", ..." if len(missing) > 3 else "")
            _log.warning("%d untrained tensors were taken from %s (%s)", len(missing), self.name, few)
        for path in shapes:
            yield from read_tensors(path, missing & shapes[path].keys())

    def _other(self, why: str) -> CheckpointError:
        fix = "give as base the checkpoint that the policy was loaded from, and publish every parameter"
        return CheckpointError(f"{why}: {fix}")


def _size(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))
