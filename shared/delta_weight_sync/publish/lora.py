"""Runs that publish a LoRA adapter itself: the tensors and the config that PEFT's `save_pretrained` writes.

The base is not even read, so it may be quantized, as in QLoRA. A replica serves its own base with the
adapter. So nothing else may be trained, and vLLM must compute the adapter as PEFT does.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from delta_weight_sync.checkpoint import ADAPTER_CONFIG
from delta_weight_sync.errors import ConfigError, ProtocolError
from delta_weight_sync.publish.adapters import unwrapped
from delta_weight_sync.publish.names import plain_name
from delta_weight_sync.publish.sharding import local
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest
from delta_weight_sync.scratch import Scratch

# Fields of a LoraConfig, and the only values with which vLLM computes an adapter as PEFT does.
_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "use_dora": (False,),
    "modules_to_save": (None, []),
    "bias": ("none",),
    "lora_bias": (False,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (False,),
    "use_bdlora": (None, False, {}),
    # The other ways change the base's weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_TENSORS: Final = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")
# Fields that say what the tensors mean. They stay the same in a run, because its versions share one config.
_MEANING: Final = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
_MERGED: Final = "leave out adapter=True, and give the base as base"


@dataclass(frozen=True)
class Adapter:
    """The active adapter of a PEFT model.

    Attributes:
        tensors: Its parameters, by their names in PEFT's file.
        config: What PEFT's `adapter_config.json` holds.
    """

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    @property
    def base(self) -> str:
        """The base's id on the Hub, or the name of its folder; "" if it is unknown."""
        name = str(self.config.get("base_model_name_or_path") or "")
        return Path(name).resolve().name if Path(name).is_dir() else name

    def is_untrained(self) -> bool:
        """Whether the adapter changes nothing yet: PEFT starts with one of its two factors as zeros."""
        zeros = (tensor for name, tensor in self if name.endswith(("lora_B.weight", "lora_embedding_A")))
        return not any(local(tensor).any() for tensor in zeros)

    def require_same_meaning(self, before: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the tensors mean something else than with the config `before`."""
        for key in _MEANING:
            # Of overlapping patterns the first one counts, so their order means something, too.
            if json.dumps(self.config.get(key)) != json.dumps(before.get(key)):
                raise ConfigError(
                    f"the adapter has {key}={self.config.get(key)!r}, but the run has {before.get(key)!r}:"
                    " choose another run name"
                )

    def write_config(self, folder: Path) -> None:
        """Write `adapter_config.json`, with the same bytes in every process."""
        text = json.dumps(self.config, indent=2)
        (folder / ADAPTER_CONFIG).write_text(text)


def adapter_of(model: Any) -> Adapter:
    """Return the active adapter of a PEFT model. An `Adapter` is returned as it is.

    Raises:
        ConfigError: This is no PEFT model with one active adapter, or vLLM does not compute this adapter as
            PEFT does, or something else is trained, too. The message names what.
    """
    if isinstance(model, Adapter):
        return model
    inner = unwrapped(model)
    peft = sys.modules.get("peft")  # where PEFT was not imported, no model is PEFT's
    if peft is None or not isinstance(inner, peft.PeftModel):
        raise ConfigError(
            f"with adapter=True, publish the PeftModel, as in `publish(model)`, not a {type(inner).__name__}"
        )
    names = list(inner.active_adapters)
    if len(names) != 1:
        raise ConfigError(
            f"the model has {len(names)} active adapters: activate one with `model.set_adapter(name)`"
        )
    name = names[0]
    config = inner.peft_config[name]
    _require_plain(name, config)
    mine = re.compile(rf"\.lora_\w+\.{re.escape(name)}(\.|$)")
    own = dict[str, torch.Tensor]()
    for key, parameter in inner.named_parameters(remove_duplicate=False):
        if mine.search(key):
            own[key] = parameter
        elif parameter.requires_grad:
            raise ConfigError(
                f"{plain_name(key)} is trained, but is no part of adapter {name!r}: freeze it, or {_MERGED}"
            )
    for path, layer in inner.named_modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer) and name in layer.scaling:
            _require_scale(plain_name(path), name, layer, config)
    found = peft.get_peft_model_state_dict(
        inner, state_dict=own, adapter_name=name, save_embedding_layers=False
    )
    for key in found:
        if not key.endswith(_TENSORS):
            raise ConfigError(f"adapter {name!r} has {plain_name(key)}, which vLLM does not serve: {_MERGED}")
    return Adapter({plain_name(key): found[key] for key in found}, _as_json(inner, config))


def config_of(reader: RunReader, manifest: Manifest) -> dict[str, Any]:
    """The adapter's config in a run. Raises `ProtocolError` if it is damaged."""
    refs = [ref for ref in manifest.anchor.small if ref.name == ADAPTER_CONFIG]
    with Scratch() as folder:
        paths = reader.fetch_all(refs, folder)
        try:
            return dict(json.loads(paths[0].read_bytes()))
        except (ValueError, TypeError, IndexError, RecursionError) as error:
            raise ProtocolError(f"the run's {ADAPTER_CONFIG} is damaged: start a new run") from error


def _require_plain(name: str, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise ConfigError(
            f"adapter {name!r} is of PEFT's type {kind}, which vLLM does not serve: train a plain"
            " `LoraConfig`"
        )
    for key, allowed in _PLAIN.items():
        value = getattr(config, key, allowed[0])
        plain = value.lower() if isinstance(value, str) else value
        if not any(plain == each and type(plain) is type(each) for each in allowed):
            raise ConfigError(
                f"adapter {name!r} has {key}={value!r}, which vLLM does not serve in an adapter: train"
                f" without it, or {_MERGED}"
            )


def _require_scale(path: str, name: str, layer: Any, config: Any) -> None:
    """Raise `ConfigError` unless a layer's adapter is plain, and has the scale that the config gives it."""
    if name in getattr(layer, "lora_variant", ()):
        kind = type(layer.lora_variant[name]).__name__
        raise ConfigError(f"{path} is adapted by PEFT's {kind}, which vLLM does not serve: {_MERGED}")
    rank = layer.r[name]
    scale = layer.lora_alpha[name] / (math.sqrt(rank) if config.use_rslora else rank)
    if layer.scaling[name] != scale:
        raise ConfigError(
            f"{path} scales its adapter by {layer.scaling[name]}, but its config by {scale}, as vLLM does:"
            f" undo `set_scale`, or {_MERGED}"
        )


def _as_json(model: Any, config: Any) -> dict[str, Any]:
    """The config as `save_pretrained` writes it, but with sets in order."""
    fields = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    fields["inference_mode"] = True
    if not fields.get("base_model_name_or_path"):
        fields["base_model_name_or_path"] = getattr(model.base_model.model, "name_or_path", None) or None
    found: dict[str, Any] = json.loads(json.dumps(fields))
    return found
