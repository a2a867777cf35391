"""Reads Hugging Face checkpoints as bf16 bits, `{name: uint16 array}`, and writes bits as checkpoints.

A function that casts weights imports torch, which takes seconds. Mapping a file's bf16 bits needs no torch.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from delta_weight_sync.errors import CheckpointError

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"  # the weights of a checkpoint, if they are in one file
INDEX = f"{WEIGHTS}.index.json"  # says which file has which tensor, if the weights are in several files
Bits = NDArray[np.uint16]
Shapes = Mapping[str, tuple[int, ...]]
_HEAD = "lm_head.weight"
_SHARDS = "model*.safetensors"
# What a server reads besides the weights: config, tokenizer, chat template, processors.
_FILES = (
    *("config.json", "generation_config.json", "*token*", "vocab*", "merges.txt", "spiece.model"),
    *("chat_template*", "*processor*.json"),
)
_log = logging.getLogger("delta_weight_sync")


def to_bits(tensor: torch.Tensor) -> Bits:
    """Return a copy of `tensor` as bf16 bits: uint16, of the same shape, C-contiguous, on the host.

    On the host, `codec.nearest` rounds, not torch, because torch's NaN bits depend on the machine.
    """
    import torch

    from delta_weight_sync.codec import nearest  # imported here, because numba takes seconds to load

    if tensor.is_cuda or tensor.dtype == torch.bfloat16:
        return tensor.detach().to(torch.bfloat16, copy=True).cpu().contiguous().view(torch.uint16).numpy()
    words = tensor.detach().float().contiguous().numpy().view(np.uint32)
    bits = np.empty(tensor.shape, np.uint16)
    nearest(words.reshape(-1), bits.reshape(-1))
    return bits


def read_bits(folder: Path) -> Iterator[tuple[str, Bits]]:
    """Yield (name, bf16 bits) of every tensor of a checkpoint folder. Raises `CheckpointError`."""
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise CheckpointError(f"{folder.name} has no .safetensors file: name a Hugging Face checkpoint")
    for path in files:
        yield from read_tensors(path, shapes_in(path))


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a `.safetensors` file. Reads only the header."""
    with safe_open(path, framework="numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read_tensors(path: Path, names: Iterable[str]) -> Iterator[tuple[str, Bits]]:
    """Yield (name, bf16 bits) of the tensors `names` of a `.safetensors` file, in their shapes.

    Raises `CheckpointError` for floats of 8 bits or fewer, as in a quantized checkpoint.
    """
    with safe_open(path, framework="pt") as file:
        for name in names:
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and tensor.element_size() == 1:
                kind = f"its {tensor.dtype} needs scales; name a checkpoint that is not quantized"
                raise CheckpointError(f"{name} in {path.name} cannot be cast to bfloat16: {kind}")
            yield name, to_bits(tensor)


def map_bits(path: Path, mode: Literal["r", "r+"] = "r") -> dict[str, Bits]:
    """Map the bf16 tensors of a `.safetensors` file into memory, as uint16 arrays.

    In mode "r+", writing to an array changes the file. Raises `SafetensorError` for other kinds of files.
    """
    with safe_open(path, framework="numpy"):  # checks that every tensor lies inside the file
        pages = np.memmap(path, np.uint8, mode).view(np.ndarray)
    data = 8 + int.from_bytes(pages[:8].tobytes(), "little")
    header = json.loads(pages[8:data].tobytes())
    header.pop("__metadata__", None)
    bits: dict[str, Bits] = {}
    for name, entry in header.items():
        if entry["dtype"] == "BF16":
            start, end = entry["data_offsets"]
            bits[name] = pages[data + start : data + end].view(np.uint16).reshape(entry["shape"])
    return bits


def map_folder(folder: Path, mode: Literal["r", "r+"] = "r") -> dict[str, Bits]:
    """Like `map_bits`, for all files of a checkpoint's weights."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: bits for path in files for name, bits in map_bits(path, mode).items()}


def write_bits(shapes: Shapes, bits: Callable[[str], Bits], path: Path) -> None:
    """Write a bf16 `.safetensors` file that transformers and vLLM load.

    `bits` is called for one tensor of `shapes` after the other, so only one tensor has to be in memory.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    table = json.dumps(header).encode()
    table += b" " * (-len(table) % 8)
    with path.open("wb") as file:
        file.write(len(table).to_bytes(8, "little") + table)
        for name in shapes:
            file.write(np.ascontiguousarray(bits(name)).data)


class Base:
    """The checkpoint that a run starts from: a folder, or a model on the Hub. It may have no weights."""

    def __init__(self, source: str | Path) -> None:
        """Find the checkpoint; raises `CheckpointError`."""
        from huggingface_hub import snapshot_download  # imported here, because readers do not need it

        try:  # this rarely downloads weights: a trainer that loaded the model has them in the Hub's cache
            given = Path(source) if Path(source).is_dir() else None
            self.folder = given or Path(snapshot_download(str(source), allow_patterns=[*_FILES, _SHARDS]))
        except (OSError, ValueError) as error:
            what = f"base {str(source)!r} is neither a folder nor a model of the Hub that can be read here"
            raise CheckpointError(f"{what}: {str(error).splitlines()[0]}") from error
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

    def untrained(
        self, trained: Shapes, own: Iterable[str], bits: Callable[[str], Bits]
    ) -> Iterator[tuple[str, Bits]]:
        """Yield (name, bits) of the checkpoint's tensors that the trainer does not publish itself.

        Args:
            trained: Shapes of the tensors that the trainer publishes.
            own: Names of the tensors that this rank owns. The largest one is compared with the checkpoint.
                (If this rank owns only norms, that proves little, because many models have equal norms.)
            bits: Returns the bits of the tensor with a given name, one of `own`.

        Raises:
            CheckpointError: The policy was not loaded from this checkpoint. If the policy's unmatched tensors
                have as many elements as the checkpoint's unmatched tensors, they count as the same tensors
                under other names. Then there is no error, and nothing is yielded.
        """
        shapes = {path: shapes_in(path) for path in sorted(self.folder.glob(_SHARDS))}
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
        elements = {name: math.prod(shape) for name, shape in (stored | dict(trained)).items()}
        if strange:
            if sum(elements[name] for name in strange) == sum(elements[name] for name in missing):
                return  # the same tensors under other names
            lack = f", and {min(missing)} was not published" if missing else ""
            raise self._other(f"{min(strange)} is not in {self.name}{lack}")
        # The policy may use a published tensor of this shape as its head; then this head would be wrong.
        if _HEAD in missing and stored[_HEAD] in trained.values():
            raise self._other(f"{_HEAD} was not published, but {self.name} does not tie it to the embedding")
        if missing:  # compare one tensor: different models have a smaller share of equal elements than 1 %
            largest = max(own, key=elements.__getitem__)
            file = next(path for path in shapes if largest in shapes[path])
            ((_, loaded),) = read_tensors(file, [largest])
            if (loaded == bits(largest)).mean() < 0.01:
                raise self._other(f"{largest} has other values than in {self.name}")
            few = ", ".join(sorted(missing)[:3]) + (", ..." if len(missing) > 3 else "")
            _log.warning("%d untrained tensors were taken from %s (%s)", len(missing), self.name, few)
        for path in shapes:
            yield from read_tensors(path, missing & shapes[path].keys())

    def _other(self, why: str) -> CheckpointError:
        fix = "give as base the checkpoint that the policy was loaded from, and publish every parameter"
        return CheckpointError(f"{why}: {fix}")
