"""The checkpoint that a run starts from, and how the trainer's tensors become those of a version.

A version holds each tensor of the checkpoint, under its name there, in its dtype there. There are two
exceptions:

- A checkpoint that is float32 as a whole gives versions in bf16, the dtype that servers use. In a checkpoint
  of a 16-bit dtype, float32 tensors are there on purpose, so they stay float32.
- If the trainer holds a tensor in another 16-bit dtype than the checkpoint, the version has the trainer's.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from delta_weight_sync.checkout import RECORD
from delta_weight_sync.checkpoint import (
    CONVERT,
    DTYPES,
    FLOATS,
    FOREIGN,
    INDEX,
    UNQUANTIZED,
    WEIGHTS,
    Bits,
    Checkpoint,
    Shapes,
    Spec,
    Specs,
    dtype_of,
)
from delta_weight_sync.errors import CheckpointError
from delta_weight_sync.publish.names import Joined, Names, View, models_of, names_of
from delta_weight_sync.publish.readable import no_elements
from delta_weight_sync.records import MAX_ASSETS
from delta_weight_sync.signing import SECRET

HALF: Final = ("BF16", "F16")
MERGED: Final = "merge adapters, and publish the plain model, `model.merge_and_unload()`"
PEFT: Final = re.compile(r"\.base_layer\.|\.lora_|\.modules_to_save\.")
_HEAD: Final = "lm_head.weight"
_PACKED: Final = ("U8", "I8", "I32")  # dtypes in which quantized checkpoints pack weights
# Files of a checkpoint that no version has: weights in any format, what training left behind, pages and
# pictures.
_WEIGHTS: Final = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.npz", "*.ot"),
    *("*.onnx", "*.onnx_data", "*.tflite", "*.mlmodel", "*.pkl"),
    *("original/*", "onnx/*", "coreml/*", "openvino/*"),
)
_LEFT_OUT: Final = (
    *(*_WEIGHTS, "*.index.json", "trainer_state.json", "*.md", "*.png", "*.jpg", "*.pdf", ".*", "*/.*"),
    *("hf_quant_config.json", "quant_config.json", "quantize_config.json", RECORD),
)
# The subfolders that servers read. Others are no part of a checkpoint: perhaps a bucket, logs, other models.
_FOLDERS: Final = ("additional_chat_templates/*", "[0-9]_*/*")
_SMALL: Final = 1 << 16  # bytes; a larger file is no key
_QUANTIZATION: Final = {"quantization_config", "compression_config"}  # fields of a config
_KEY: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")  # a key's end
_log = logging.getLogger("delta_weight_sync")


class Target(NamedTuple):
    """A tensor of a version, made from one tensor of the trainer.

    Attributes:
        name: Its name in the checkpoint.
        dtype: Its dtype in a version.
        words: The shape of its words.
        view: How it lies in the trainer's tensor; None if it is the whole tensor.
    """

    name: str
    dtype: str
    words: tuple[int, ...]
    view: View | None


@dataclass(frozen=True)
class Plan:
    """How the trainer's tensors become the tensors of a version.

    Attributes:
        source: Name of the checkpoint or of the run that decides, for messages.
        stored: The tensors that it has; empty if it has no weights.
        names: What the parameters of the trainer's model are called there.
        quantized: Whether it is quantized, so that its dtypes say nothing about the trainer's.
        fixed: Whether it is a run, whose dtypes cannot change.
    """

    source: str
    stored: Specs
    names: Names
    quantized: bool = False
    fixed: bool = False
    _known: dict[tuple[str, torch.dtype, torch.Size], list[Target]] = field(
        default_factory=dict, compare=False
    )

    def targets(self, name: str, tensor: torch.Tensor) -> list[Target]:
        """The tensors of a version that are views of a tensor of the trainer.

        Raises:
            CheckpointError: A version cannot hold them.
        """
        key = name, tensor.dtype, tensor.shape
        if key not in self._known:
            self._known[key] = [*self._targets(name, tensor)]
        return self._known[key]

    def _targets(self, name: str, tensor: torch.Tensor) -> Iterator[Target]:
        trained = dtype_of(tensor)
        shape = tuple(tensor.shape)
        views = self.names.views.get(name)
        named = views[0].name if views else name
        if not tensor.numel() and named in self.stored and 0 not in self.stored[named].shape:
            raise no_elements(name, tensor)
        if views is None:
            yield self.target(name, trained, shape)
        elif len(views) == 1 and views[0].is_whole:
            yield self.target(views[0].name, trained, shape)
        elif views[0].parameter != shape:
            raise CheckpointError(
                f"{name} has shape {shape}, but the model of {self.source} has {views[0].parameter}: give as"
                " base the checkpoint that the policy was loaded from"
            )
        else:
            for view in views:
                yield self.target(view.name, trained, view.shape, view)

    def target(self, name: str, trained: str, shape: tuple[int, ...], view: View | None = None) -> Target:
        """The tensor `name` of a version; `trained` is the dtype that the trainer has it in."""
        dtype = self._dtype(name, trained)
        return Target(name, dtype, Spec(dtype, shape).words, view)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor that comes from this tensor of the trainer."""
        names = [view.name for view in self.names.views.get(name, ())] or [name]
        return not self.stored or any(each in self.stored for each in names)

    def joined(self, name: str) -> Joined | None:
        """The tensors that are computed from a tensor of the trainer and others."""
        return self._joined.get(name)

    @cached_property
    def _joined(self) -> dict[str, Joined]:
        return {source: joined for joined in self.names.joined for source in joined.sources}

    @cached_property
    def main(self) -> str:
        """The float dtype of most elements of the checkpoint; "" if it has none."""
        return main_dtype(self.stored)

    def is_kept(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor in a wider float dtype than most of its weights."""
        return self.main in HALF and name in self.stored and self.stored[name].dtype in ("F32", "F64")

    def _dtype(self, name: str, trained: str) -> str:
        stored = self.stored[name].dtype if name in self.stored else trained
        both_float = trained in FLOATS and (stored in FLOATS or self.quantized)
        if trained in _PACKED and stored in FLOATS:
            raise CheckpointError(
                f"{name} is quantized ({trained}) in the trainer: load the model in bf16, or merge and"
                " dequantize it, before you publish"
            )
        if not both_float and stored != trained:
            raise CheckpointError(
                f"{name} is {trained} in the trainer, but {stored} in {self.source}: publish it in that"
                " dtype, or leave it out if training does not change it"
            )
        if not both_float or (self.fixed and name in self.stored) or self.is_kept(name):
            return stored
        if trained in HALF or (trained == "F32" and name in self.names.float32):
            return trained
        return self.main if self.main in HALF else "BF16"


class Base:
    """The checkpoint that a run starts from: a folder, or a model on the Hub. It may have no weights.

    Attributes:
        folder: Where the checkpoint is.
        name: Its name, for messages.
    """

    def __init__(self, source: str | Path, *, trust_remote_code: bool = False) -> None:
        """Find the checkpoint, and read its config.

        Args:
            source: The folder, or the model's id on the Hub.
            trust_remote_code: Whether versions get the checkpoint's Python files.

        Raises:
            CheckpointError: There is no such checkpoint, or a run cannot start from it.
        """
        self._source = source
        self.folder, self.name = _find(source)
        config = self.folder / "config.json"
        if not config.is_file():
            raise CheckpointError(f"{self.name} holds no config.json: name a checkpoint's folder as base")
        self._config: dict[str, Any] = json.loads(config.read_text())
        self._code = trust_remote_code
        self._require_known_code()

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The weights, of which only a new run needs more than the trainer has. None if there are none.

        Raises:
            CheckpointError: They are incomplete, or in a format other than safetensors.
        """
        if not Path(self._source).is_dir():
            _download(str(self._source), self.folder)
        return Checkpoint(self.folder) if _has_weights(self.folder) else None

    @property
    def _specs(self) -> Specs:
        return self.checkpoint.specs if self.checkpoint else {}

    def plan(self, model: Any = None) -> Plan:
        """Plan how the trainer's tensors become those of a version.

        `model`: the trainer's model. Without it, the names count of the models that `from_pretrained` may
        make of the checkpoint.
        """
        shapes = {name: spec.shape for name, spec in self._specs.items()}
        names = find_names(self.folder if model is None else model, shapes)
        if not names.views and self._flag_ties():
            names = replace(names, tied={_HEAD: "the embedding"}, head=_HEAD)
        tied = {name: source for name, source in names.tied.items() if not self._differ(name, source)}
        packed = any(spec.dtype not in DTYPES for spec in self._specs.values())
        quantized = packed or any(part.keys() & _QUANTIZATION for part in self._parts())
        return Plan(self.name, self._specs, replace(names, tied=tied), quantized=quantized)

    def _parts(self) -> list[dict[str, Any]]:
        """The config and the configs in it."""
        return [self._config, *(part for part in self._config.values() if isinstance(part, dict))]

    def _differ(self, name: str, source: str) -> bool:
        """Whether the checkpoint has two tensors with different values. Then `from_pretrained` does not tie
        them, whatever the config says."""
        specs = self._specs
        if self.checkpoint is None or name not in specs or source not in specs:
            return False
        if specs[name] != specs[source]:
            return True
        return not np.array_equal(self.checkpoint.read(name), self.checkpoint.read(source))

    def _flag_ties(self) -> bool:
        """Whether the config says that the head is the embedding, for a model unknown to transformers."""
        text = self._config.get("text_config") or {}
        return bool(text.get("tie_word_embeddings", self._config.get("tie_word_embeddings", False)))

    def untrained(
        self, plan: Plan, trained: Specs, own: Iterable[str], bits: Callable[[str], Bits]
    ) -> Iterator[tuple[str, str, Bits]]:
        """Yield (name, dtype, words) of the checkpoint's tensors that the trainer does not publish.

        Args:
            plan: The result of `plan`.
            trained: The tensors that the trainer publishes, as versions hold them.
            own: Names of those that this rank owns. The largest one is compared with the checkpoint. (If this
                rank owns only norms, that proves little, because many models have equal norms.)
            bits: Returns the words of a tensor in `own`.

        Raises:
            CheckpointError: The policy was not loaded from this checkpoint, or a tensor is missing that the
                checkpoint cannot give.
        """
        if self.checkpoint is None:
            return
        tied = plan.names.tied
        owned = set(own)
        for name in sorted(tied.keys() & trained.keys()):
            both = {name, tied[name]} <= owned
            if name not in self._specs or (both and np.array_equal(bits(name), bits(tied[name]))):
                raise self._error(
                    f"{name} was published, but the config of {self.name} ties it to {tied[name]}",
                    "publish `model.named_parameters()`, which has tied weights once; or save the untied"
                    " model (`save_pretrained`), and give that folder as base",
                )
        for name, spec in trained.items():
            if name in self._specs and self._specs[name].shape != spec.shape and not plan.quantized:
                raise self._other_shape(name, spec.shape, self._specs[name].shape)
        missing = self._specs.keys() - trained.keys() - tied.keys()
        strange = trained.keys() - self._specs.keys()
        lost = {*plan.names.loaded} - plan.names.buffers - trained.keys() - self._specs.keys()
        if plan.quantized:
            missing = self._dequantized(plan, missing, lost)
            strange -= plan.names.loaded
        if strange:
            raise self._unknown(min(strange), missing)
        shapes = {spec.shape for spec in trained.values()}
        if not plan.names.views and _HEAD in missing and self._specs[_HEAD].shape in shapes:
            # Nothing says whether the policy uses a trained tensor as its head.
            raise self._error(f"{_HEAD} was not published, but {self.name} does not tie it to the embedding")
        if lost:
            raise self._error(
                f"{min(lost)} is neither in {self.name} nor published",
                "publish every parameter that the checkpoint does not have",
            )
        if missing:
            self._require_same_model(trained, owned, bits)
            shown = sorted(missing, key=lambda name: (name not in plan.names.buffers, name))  # buffers first
            few = ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
            _log.warning(
                "%d untrained tensors were taken from %s (%s); if training changes one of them, such as a"
                " buffer, which `named_parameters()` lacks, publish the model itself: `publish(model)`",
                *(len(missing), self.name, few),
            )
        main = _half(plan, trained)
        for name in self._specs:  # in the checkpoint's order
            if name in missing:
                stored = self._specs[name].dtype
                kept = plan.is_kept(name) or (stored == "F32" and name in plan.names.float32)
                dtype = main if stored in FLOATS and not kept else stored
                yield name, dtype, self.checkpoint.read(name, dtype)

    def write_files(self, folder: Path, plan: Plan, version: Specs) -> None:
        """Copy the files that a server needs, all but weights, and write a config that fits a version.

        Raises:
            CheckpointError: The checkpoint's folder has too many files.
        """
        copied = 0
        found = [*self.folder.iterdir(), *chain.from_iterable(map(self.folder.glob, _FOLDERS))]
        for path in sorted(found):
            name = path.relative_to(self.folder).as_posix()
            left_out = any(fnmatch.fnmatch(name, pattern) for pattern in _LEFT_OUT)
            if left_out or not path.is_file() or (path.suffix == ".py" and not self._code):
                continue
            if path.stat().st_size <= _SMALL and SECRET.encode() in path.read_bytes():
                _log.warning("versions lack %s of %s, because it holds a secret key", name, self.name)
                continue
            if not _KEY.fullmatch(name):
                _log.warning(
                    "versions lack %s of %s: its name has characters that no key may have", name, self.name
                )
                continue
            if (copied := copied + 1) > MAX_ASSETS // 2:
                raise CheckpointError(
                    f"{self.name} has more than {MAX_ASSETS // 2} files besides its weights: give the"
                    " checkpoint a folder of its own"
                )
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".json" and not self._code and (without := _without_code(path)):
                if name != "config.json":
                    _log.warning(
                        "%s of versions has no auto_map; for its code, set trust_remote_code=True", name
                    )
                (folder / name).write_text(without)
            else:
                shutil.copyfile(path, folder / name)
        config = json.loads(json.dumps(self._config))
        for part in (config, *(part for part in config.values() if isinstance(part, dict))):
            for key in _QUANTIZATION:
                part.pop(key, None)
            if part is config or {"dtype", "torch_dtype"} & part.keys():
                part.pop("torch_dtype", None)
                part["dtype"] = DTYPES[_half(plan, version)][0]
            if plan.names.head in version and (part is config or "tie_word_embeddings" in part):
                part["tie_word_embeddings"] = False  # the trainer's model has a head of its own
        if not self._code:
            config.pop("auto_map", None)
        (folder / "config.json").write_text(json.dumps(config, indent=2))

    def _require_known_code(self) -> None:
        """Raise `CheckpointError` if only untrusted code of the checkpoint can load the model."""
        if self._code or not self._config.get("auto_map"):
            return
        from transformers import CONFIG_MAPPING

        kind = self._config.get("model_type")
        if kind not in CONFIG_MAPPING:
            raise CheckpointError(
                f"the model of {self.name} needs Python code of its own (auto_map in config.json): set"
                " trust_remote_code=True to put this code into every version; replicas then need"
                " --trust-remote-code"
            )
        _log.warning(
            "versions lack the Python code and the auto_map of %s, because transformers has its own code for"
            " %s; set trust_remote_code=True to publish this code",
            *(self.name, kind),
        )

    def _dequantized(self, plan: Plan, missing: set[str], lost: set[str]) -> set[str]:
        """Return those of the `missing` tensors that the dequantized model has, too.

        `lost`: parameters that are neither published nor in the checkpoint under their own names.
        """
        wanted = plan.names.loaded
        packed = [
            n
            for n in missing & wanted
            if self._specs[n].dtype not in DTYPES or self._specs[n].dtype in _PACKED
        ]
        packed += lost
        if packed or not wanted:
            which = f"{min(packed)} was not published, and " if packed else ""
            raise CheckpointError(f"{which}{self.name} is quantized: {UNQUANTIZED}, and give FOLDER as base")
        if dropped := sorted(missing - wanted):
            _log.warning(
                "versions lack %d tensors of %s, such as %s, and its quantization_config, because the trainer"
                " publishes unquantized weights: serve the run's own model (`delta-weight-sync checkout`)",
                *(len(dropped), self.name, dropped[0]),
            )
        return missing & wanted

    def _require_same_model(self, trained: Specs, own: Iterable[str], bits: Callable[[str], Bits]) -> None:
        """Compare one tensor: different models have a smaller share of equal elements than 1 %."""
        assert self.checkpoint is not None
        both = [name for name in own if name in self._specs and self._specs[name].dtype in FLOATS]
        if not both:
            return
        largest = max(both, key=lambda name: math.prod(trained[name].shape))
        loaded = self.checkpoint.read(largest, trained[largest].dtype)
        if (loaded == bits(largest)).mean() < 0.01:
            raise self._error(f"{largest} has other values than in {self.name}")

    def _unknown(self, name: str, missing: set[str]) -> CheckpointError:
        if PEFT.search(name):
            return CheckpointError(f"{name} is PEFT's name of a parameter: {MERGED}")
        lack = f", and {min(missing)} was not published" if missing else ""
        return self._error(
            f"{name} is not in {self.name}{lack}",
            "give as base the checkpoint that the policy was loaded from, and publish the model itself,"
            " `publish(model)`, or tensors under the names that `model.save_pretrained` gives them",
        )

    def _other_shape(self, name: str, now: tuple[int, ...], then: tuple[int, ...]) -> CheckpointError:
        fix = ""
        if len(now) > 1 and now[1:] == then[1:] and any(part in name for part in ("emb", "head", "wte")):
            fix = "if you resized the vocabulary, save the resized model and tokenizer, and give that as base"
        return self._error(f"{name} has shape {now}, but {then} in {self.name}", fix)

    def _error(self, why: str, fix: str = "") -> CheckpointError:
        same = "give as base the checkpoint that the policy was loaded from, and publish every parameter"
        return CheckpointError(f"{why}: {fix or same}")


def find_names(source: Any, stored: Shapes) -> Names:
    """Find the checkpoint's names of a live model, or of the models that a checkpoint may be loaded as.

    Of two models that have a parameter of the same name, the first counts.
    """
    if not isinstance(source, Path):
        return names_of(source, stored)
    found = [names_of(model, stored) for model in models_of(source)] or [Names()]
    views = {name: made for names in reversed(found) for name, made in names.views.items()}
    return replace(found[0], views=views)


def _without_code(path: Path) -> str:
    """The content of a JSON file without its `auto_map`, which names Python files; "" if it has none."""
    with suppress(ValueError):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.pop("auto_map", None):
            return json.dumps(content, indent=2)
    return ""


def main_dtype(specs: Specs) -> str:
    """The float dtype of most elements; "" if there is none."""
    elements = Counter[str]()
    for spec in specs.values():
        if spec.dtype in FLOATS:
            elements[spec.dtype] += math.prod(spec.shape)
    return max(elements, key=elements.__getitem__, default="")


def _half(plan: Plan, version: Specs) -> str:
    """The 16-bit dtype of most elements of a version."""
    found = main_dtype({name: spec for name, spec in version.items() if spec.dtype in HALF})
    return found or (plan.main if plan.main in HALF else "BF16")


def _find(source: str | Path) -> tuple[Path, str]:
    """Return the checkpoint's folder, and its name. Downloads all but the weights if it is on the Hub."""
    from huggingface_hub import snapshot_download  # imported here, because it takes long

    if Path(source).is_dir():
        return Path(source), Path(source).resolve().name
    try:
        return Path(snapshot_download(str(source), ignore_patterns=[*_WEIGHTS])), str(source)
    except (OSError, ValueError) as error:
        what = f"base {str(source)!r} is neither a folder nor a model of the Hub that can be read here"
        raise CheckpointError(f"{what}: {str(error).splitlines()[0]}") from error


def _download(model: str, folder: Path) -> None:
    """Download the weights of a model on the Hub. The cache has them if the trainer loaded the model."""
    from huggingface_hub import snapshot_download

    try:
        index = folder / INDEX
        files = {WEIGHTS}
        if index.is_file():
            files = set(json.loads(index.read_text())["weight_map"].values())
        snapshot_download(model, allow_patterns=sorted(files))
    except (OSError, ValueError, LookupError) as error:
        raise CheckpointError(
            f"the weights of {model} cannot be read: {str(error).splitlines()[0]}"
        ) from error
    if not _has_weights(folder):
        _require_no_foreign(model)


def _require_no_foreign(model: str) -> None:
    """Raise `CheckpointError` if a model on the Hub has weights, but none in safetensors."""
    from huggingface_hub import HfApi

    names = list[str]()
    with suppress(OSError):  # offline: only the cache is known, which has no weights
        names = HfApi().list_repo_files(model)
    for name in names:
        if any(fnmatch.fnmatch(name, pattern) for pattern in FOREIGN):
            raise CheckpointError(f"{model} has its weights in {name}: {CONVERT}")


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in (INDEX, "*.safetensors", *FOREIGN))
