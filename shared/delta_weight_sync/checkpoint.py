"""Reads and writes Hugging Face checkpoints as 16-bit words, `{name: uint16 array}`.

A tensor of a 16-bit dtype is one word per element, so its words have the tensor's shape. A tensor of a wider
dtype has several words per element, the lowest first, in one more dimension: a float32 tensor [3, 4] has
words [3, 4, 2]. An element of one byte is a word of its own, 0 to 255. Everything behind this module (codec,
digest, mirror, routes) sees only words, so it treats every dtype alike, bit for bit.

A function that casts weights imports torch, which takes seconds. Mapping a file's words needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from delta_weight_sync.errors import CheckpointError

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"  # the weights of a checkpoint, if they are in one file
ADAPTER = "adapter_model.safetensors"  # PEFT's name of the weights of an adapter, and of its config
ADAPTER_CONFIG = "adapter_config.json"
INDEX = f"{WEIGHTS}.index.json"  # says which file has which tensor, if the weights are in several files
Bits = NDArray[np.uint16]
Shapes = Mapping[str, tuple[int, ...]]

# safetensors' name of a dtype -> torch's name, and bytes per element.
DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
FLOATS: Final = ("BF16", "F16", "F32", "F64")
FOREIGN: Final = ("pytorch_model*.bin", "*.pth", "*.gguf", "*.h5", "*.msgpack")  # weights in other formats
CONVERT: Final = (
    "convert it to safetensors, with `AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)` and"
    " the tokenizer's `save_pretrained(FOLDER)`, and give FOLDER"
)
UNQUANTIZED: Final = (
    "dequantize it first, with"
    ' `AutoModelForCausalLM.from_pretrained(..., dtype="bfloat16").save_pretrained(FOLDER)`'
)
_NAMES: Final = {name: dtype for dtype, (name, _) in DTYPES.items()}


class Spec(NamedTuple):
    """What a checkpoint says about a tensor: its dtype, by safetensors' name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def words(self) -> tuple[int, ...]:
        """The shape of the tensor's words."""
        return words_shape(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in a file."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    @classmethod
    def of_words(cls, dtype: str, words: tuple[int, ...]) -> Spec:
        """The spec of a tensor whose words have the shape `words`."""
        return cls(dtype, words[:-1] if DTYPES[dtype][1] > 2 else words)


Specs = Mapping[str, Spec]


def words_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the words of a tensor."""
    size = DTYPES[dtype][1]
    return (*shape, size // 2) if size > 2 else tuple(shape)


def dtype_of(tensor: torch.Tensor) -> str:
    """safetensors' name of a tensor's dtype; "" if a version cannot hold this dtype."""
    return _NAMES.get(str(tensor.dtype).removeprefix("torch."), "")


def to_bits(tensor: torch.Tensor, dtype: str = "BF16") -> Bits:
    """Return a copy of a tensor's words, on the host: uint16, C-contiguous, as `words_shape` says.

    The tensor is cast to `dtype` first. On the host, `codec.nearest` rounds to bf16, not torch, because
    torch's NaN bits depend on the machine. A GPU rounds before it copies; its NaN bits are replaced.
    """
    import torch

    from delta_weight_sync.codec import INFINITY, NAN, nearest  # here, because numba takes seconds to load

    tensor = tensor.detach()
    rounds = dtype == "BF16" and tensor.dtype != torch.bfloat16
    if rounds and not tensor.is_cuda:
        values = tensor.float().contiguous().numpy().view(np.uint32)
        bits = np.empty(tensor.shape, np.uint16)
        nearest(values.reshape(-1), bits.reshape(-1))
        return bits
    cast = tensor.to(getattr(torch, DTYPES[dtype][0]), copy=True).cpu().contiguous()
    if DTYPES[dtype][1] == 1:
        return cast.view(torch.uint8).numpy().astype(np.uint16)
    words = cast.reshape(-1).view(torch.uint16).numpy().reshape(words_shape(dtype, tuple(tensor.shape)))
    if rounds:
        words[(words & 0x7FFF) > INFINITY] = NAN
    return words


def to_tensor(bits: NDArray[Any], dtype: str) -> torch.Tensor:
    """Return a copy of words (uint16, or uint8 for dtypes of one byte) as a tensor of `dtype`."""
    import torch

    kind = getattr(torch, DTYPES[dtype][0])
    _, shape = Spec.of_words(dtype, bits.shape)
    flat = np.array(bits, np.uint8 if DTYPES[dtype][1] == 1 else np.uint16).reshape(-1)
    return torch.from_numpy(flat).view(kind).reshape(shape)


def specs_in(path: Path) -> dict[str, Spec]:
    """Dtype and shape of every tensor of a `.safetensors` file. Reads only the header.

    Raises `CheckpointError` if the file is truncated or is not a safetensors file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: Spec(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is damaged or truncated ({error}): download it again") from error


class Checkpoint:
    """A checkpoint in a folder, read as transformers and vLLM read it.

    The index decides which file has which tensor; without an index, `model.safetensors` has them all, or else
    the only safetensors file of the folder. No other file counts: variants, stale shards and shards of
    another model may lie in the folder. A folder with an index and a `model.safetensors` that the index does
    not name is refused, because transformers and vLLM would read different files.

    Attributes:
        specs: Dtype and shape of every tensor.
    """

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises:
            CheckpointError: The folder has no safetensors weights, or the index names a file or a tensor that
                is not there. The message names it.
        """
        self.folder = folder
        self._files = _weight_map(folder)
        headers = {file: specs_in(folder / file) for file in sorted(set(self._files.values()))}
        for name, file in self._files.items():
            if name not in headers[file]:
                raise CheckpointError(
                    f"{INDEX} says that {name} is in {file}, but it is not: download {file} again"
                )
        self.specs = {name: headers[file][name] for name, file in self._files.items()}

    @property
    def paths(self) -> list[Path]:
        """The files of weights, sorted by name."""
        return [self.folder / file for file in sorted(set(self._files.values()))]

    def read(self, name: str, dtype: str = "") -> Bits:
        """Return the words of a tensor, cast to `dtype` if that is given."""
        with safe_open(self.folder / self._files[name], framework="pt") as file:
            return to_bits(file.get_tensor(name), dtype or self.specs[name].dtype)


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file of the folder, as the index says, or the only file."""
    if (folder / INDEX).is_file():
        try:
            files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            inside = {f for f in files.values() if (folder / f).is_file() and not _leads_out(Path(f))}
            lacking = sorted({*files.values()} - inside)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{INDEX} of {folder.name} is damaged ({error}): download it again"
            ) from error
        if (folder / WEIGHTS).is_file() and WEIGHTS not in files.values():
            raise CheckpointError(
                f"{folder.name} has {WEIGHTS}, which transformers reads, and {INDEX}, which vLLM reads, and"
                " the index does not name this file: remove what is not of this model"
            )
        if lacking:
            raise CheckpointError(f"{INDEX} names {lacking[0]}, which {folder.name} lacks: download it again")
        return files
    found = [path for path in [folder / WEIGHTS] if path.is_file()] or sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return dict.fromkeys(specs_in(found[0]), found[0].name)
    if found:
        raise CheckpointError(
            f"{folder.name} has {found[0].name} and {found[1].name}, but no {INDEX} that says which tensors"
            " count: remove the files that are not of this model, or save the model again"
        )
    if others := sorted(path.name for pattern in FOREIGN for path in folder.glob(pattern)):
        raise CheckpointError(f"{folder.name} has its weights in {others[0]}: {CONVERT}")
    raise CheckpointError(f"{folder.name} has no .safetensors file: name a Hugging Face checkpoint")


def _leads_out(file: Path) -> bool:
    """Whether a file's name leads out of its folder."""
    return file.is_absolute() or ".." in file.parts


def read_bits(folder: Path) -> Iterator[tuple[str, Bits]]:
    """Yield (name, words) of every tensor of a checkpoint folder. Raises `CheckpointError`."""
    checkpoint = Checkpoint(folder)
    for name, spec in checkpoint.specs.items():
        if spec.dtype not in DTYPES:
            raise CheckpointError(f"{name} is {spec.dtype}, as in a quantized checkpoint: {UNQUANTIZED}")
        yield name, checkpoint.read(name)


def map_bits(path: Path, mode: Literal["r", "r+"] = "r") -> dict[str, NDArray[Any]]:
    """Map the words of a `.safetensors` file into memory: uint16 arrays, or uint8 for dtypes of one byte.

    In mode "r+", writing to an array changes the file.

    Raises:
        SafetensorError: It is another kind of file, or damaged.
        CheckpointError: It has a dtype that versions cannot have.
    """
    with safe_open(path, framework="numpy"):  # checks that every tensor lies inside the file
        pages = np.memmap(path, np.uint8, mode).view(np.ndarray)
    data = 8 + int.from_bytes(pages[:8].tobytes(), "little")
    header = json.loads(pages[8:data].tobytes())
    header.pop("__metadata__", None)
    bits: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        dtype = entry["dtype"]
        if dtype not in DTYPES:
            raise CheckpointError(f"{path.name} has {name} in {dtype}, a dtype that no version has")
        start, end = entry["data_offsets"]
        kind = np.uint8 if DTYPES[dtype][1] == 1 else np.uint16
        shape = words_shape(dtype, tuple(entry["shape"]))
        bits[name] = pages[data + start : data + end].view(kind).reshape(shape)
    return bits


def map_folder(folder: Path, mode: Literal["r", "r+"] = "r") -> dict[str, NDArray[Any]]:
    """Like `map_bits`, for all weights of a version's folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: bits for path in files for name, bits in map_bits(path, mode).items()}


def small_files(folder: Path) -> dict[str, str]:
    """The files besides the weights with which an engine starts: name -> sha256."""
    files = (path for path in folder.iterdir() if path.is_file() and path.suffix != ".safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def dtypes_in(folder: Path) -> dict[str, str]:
    """Name -> dtype of every tensor of a version's folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: spec.dtype for path in files for name, spec in specs_in(path).items()}


def write_bits(
    shapes: Shapes, bits: Callable[[str], Bits], path: Path, dtypes: Mapping[str, str] | None = None
) -> None:
    """Write a `.safetensors` file that transformers and vLLM load.

    Args:
        shapes: Name -> shape of the words.
        bits: Returns a tensor's words. Called for one tensor of `shapes` after the other, so only one tensor
            has to be in memory.
        path: The file.
        dtypes: Name -> dtype, where that is not BF16.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    kinds = dtypes or {}
    # The widest dtypes come first, so that every tensor is aligned to the size of its elements.
    names = sorted(shapes, key=lambda name: -DTYPES[kinds.get(name, "BF16")][1])
    for name in names:
        spec = Spec.of_words(kinds.get(name, "BF16"), shapes[name])
        start = end
        end += spec.nbytes
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    table = json.dumps(header).encode()
    table += b" " * (-len(table) % 8)
    with path.open("wb") as file:
        file.write(len(table).to_bytes(8, "little") + table)
        for name in names:
            narrow = DTYPES[kinds.get(name, "BF16")][1] == 1
            file.write(np.ascontiguousarray(bits(name), np.uint8 if narrow else np.uint16).data)
