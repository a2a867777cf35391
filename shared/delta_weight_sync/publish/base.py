"""The checkpoint that a run starts from."""

from __future__ import annotations

import copy
import fnmatch
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

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
    Specs,
)
from delta_weight_sync.errors import CheckpointError
from delta_weight_sync.publish.names import find_names, models_of, names_of
from delta_weight_sync.publish.plan import HALF, PACKED, Plan, main_dtype
from delta_weight_sync.records import KEY, MAX_ASSETS
from delta_weight_sync.signing import SECRET

MERGED: Final = (
    "publish the model itself, `publish(model)`, which merges its adapters and leaves its base as it is"
)
PEFT: Final = re.compile(r"\.base_layer\.|\.lora_|\.modules_to_save\.")
_HEAD: Final = "lm_head.weight"
# Files of a checkpoint that no version has: weights in any format, pages and pictures, and what training left
# behind.
_WEIGHTS: Final = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.npz", "*.ot"),
    *("*.onnx", "*.onnx_data", "*.tflite", "*.mlmodel", "*.pkl"),
    *("original/*", "onnx/*", "coreml/*", "openvino/*"),
)
_PAGES: Final = ("*.md", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.pdf", ".*", "*/.*")
_LEFT_OUT: Final = (
    *(*_WEIGHTS, *_PAGES, "*.index.json", "trainer_state.json"),
    *("hf_quant_config.json", "quant_config.json", "quantize_config.json", RECORD),
)
# The subfolders that servers read. Others are no part of a checkpoint: perhaps a bucket, logs, other models.
_FOLDERS: Final = ("additional_chat_templates/*", "[0-9]_*/*")
_SMALL: Final = 1 << 16  # bytes; a larger file is no key
_QUANTIZATION: Final = {"quantization_config", "compression_config"}  # fields of a config
_log = logging.getLogger("delta_weight_sync")


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
        try:
            self._config = dict[str, Any](json.loads(config.read_text()))
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"config.json of {self.name} is damaged ({error}): download it again"
            ) from error
        self._code = trust_remote_code
        self._require_known_code()

    @property
    def is_on_hub(self) -> bool:
        """Whether this is a model on the Hub: `name` is its id, and the name of `folder` is its commit."""
        return not Path(self._source).is_dir()

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The weights, of which only a new run needs more than the trainer has. None if there are none.

        Raises:
            CheckpointError: They are incomplete, or in a format other than safetensors.
        """
        if self.is_on_hub:
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
        if model is not None and tied:
            ties = {name for each in models_of(self.folder) for name in names_of(each, shapes).tied}
            ties |= {_HEAD} if self._flag_ties() else set()
            if self.checkpoint:  # it lacks tied tensors, perhaps of a model unknown to transformers
                ties |= tied.keys() - self._specs.keys()
            # A model that is loaded from a version does not have the ties that only the trainer's has.
            tied = {name: source for name, source in tied.items() if name in ties}
        packed = any(spec.dtype not in DTYPES for spec in self._specs.values())
        quantized = packed or any(part.keys() & _QUANTIZATION for part in _parts(self._config))
        return Plan(self.name, self._specs, replace(names, tied=tied), quantized=quantized)

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
        known = {*self._specs, *plan.names.loaded, *plan.names.views}
        if prefix := _common_prefix(trained, known):
            raise self._error(
                f"all names that were published begin with {prefix!r}, which those of {self.name} do not",
                f"publish the model inside of the wrapper, or cut this off: `name.removeprefix({prefix!r})`",
            )
        tied = plan.names.tied
        lost = {*plan.names.loaded} - plan.names.buffers - trained.keys() - self._specs.keys()
        if self.checkpoint is None:
            self._require_none_lost(lost)
            return
        owned = set(own)
        self._require_tied_once(plan, trained, owned, bits)
        self._require_same_shapes(trained)
        missing = self._specs.keys() - trained.keys() - tied.keys()
        strange = trained.keys() - self._specs.keys()
        if plan.quantized:
            missing = self._dequantized(plan, missing, lost)
            strange -= plan.names.loaded
        if strange:
            raise self._unknown(min(strange), missing)
        shapes = {spec.shape for spec in trained.values()}
        if not plan.names.views and _HEAD in missing and self._specs[_HEAD].shape in shapes:
            # Nothing says whether the policy uses a trained tensor as its head.
            raise self._error(f"{_HEAD} was not published, but {self.name} does not tie it to the embedding")
        self._require_none_lost(lost)
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

    def _require_none_lost(self, lost: set[str]) -> None:
        """Raise `CheckpointError` if neither the checkpoint nor the trainer gives a tensor of the model."""
        if lost:
            raise self._error(
                f"{min(lost)} is neither in {self.name} nor published",
                "publish every parameter that the checkpoint does not have",
            )

    def _require_tied_once(
        self, plan: Plan, trained: Specs, owned: set[str], bits: Callable[[str], Bits]
    ) -> None:
        """Raise `CheckpointError` if a tensor was published that the model ties to another."""
        tied = plan.names.tied
        for name in sorted(tied.keys() & trained.keys()):
            comparable = {name, tied[name]} <= owned
            if name not in self._specs or (comparable and np.array_equal(bits(name), bits(tied[name]))):
                raise self._error(
                    f"{name} was published, but the config of {self.name} ties it to {tied[name]}",
                    "publish `model.named_parameters()`, which has tied weights once; or save the untied"
                    " model (`save_pretrained`), and give that folder as base",
                )

    def _require_same_shapes(self, trained: Specs) -> None:
        """Raise `CheckpointError` for another shape than in the checkpoint. Quantized tensors have others."""
        for name, spec in trained.items():
            stored = self._specs.get(name, spec)
            if stored.dtype in FLOATS and stored.shape != spec.shape:
                raise self._other_shape(name, spec.shape, stored.shape)

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
            if not re.fullmatch(KEY, f"files/{name}"):
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
        config = copy.deepcopy(self._config)
        for part in _parts(config):
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
        kind = self._config.get("model_type")
        try:
            from transformers import CONFIG_MAPPING

            is_known = kind in CONFIG_MAPPING
        except ImportError:
            is_known = False
        if not is_known:
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
        dtypes = {name: self._specs[name].dtype for name in missing & wanted}
        packed = [name for name, dtype in dtypes.items() if dtype not in DTYPES or dtype in PACKED]
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


def _common_prefix(names: Iterable[str], known: Collection[str]) -> str:
    """The prefix without which each of `names` is one of the `known`; "" if there is none."""
    first = min(names, default="")
    for cut in (at + 1 for at, letter in enumerate(first) if letter == "." and first not in known):
        if all(name.startswith(first[:cut]) and name[cut:] in known for name in names):
            return first[:cut]
    return ""


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A config, and the configs in it."""
    return [config, *(part for part in config.values() if isinstance(part, dict))]


def _without_code(path: Path) -> str:
    """The content of a JSON file without its `auto_map`, which names Python files; "" if it has none."""
    with suppress(ValueError, RecursionError):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.pop("auto_map", None):
            return json.dumps(content, indent=2)
    return ""


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
        return Path(snapshot_download(str(source), ignore_patterns=[*_WEIGHTS, *_PAGES])), str(source)
    except (OSError, ValueError) as error:
        what = f"base {str(source)!r} is neither a folder nor a model of the Hub that can be read here"
        raise CheckpointError(f"{what}: {str(error).splitlines()[0]}") from error


def _download(model: str, folder: Path) -> None:
    """Download the weights of a model on the Hub, of the revision whose other files `folder` has. The cache
    has them if the trainer loaded the model."""
    from huggingface_hub import snapshot_download

    try:
        index = folder / INDEX
        files = {WEIGHTS}
        if index.is_file():
            files = set(json.loads(index.read_text())["weight_map"].values())
        snapshot_download(model, revision=folder.name, allow_patterns=sorted(files))
    except (OSError, ValueError, LookupError, RecursionError) as error:
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
