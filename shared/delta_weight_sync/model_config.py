"""Compares the model's config that an engine was started with, and the config of a version.

A model computes with more than its weights: no tensor holds the base of rotary embeddings, an epsilon or a
sliding window. An engine that somebody started with another config of the same shapes would take the
published weights, have their digest, and generate other tokens.
"""

import copy
import dataclasses
import json
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from delta_weight_sync.errors import EngineError, RouteError

_FILE: Final = "config.json"
# Fields that an engine does not compute with, and such as are checked elsewhere: dtypes and quantization when
# the weights are loaded, a tied head by the tensors.
_IGNORED: Final = frozenset(
    {
        *(
            "_commit_hash",
            "_name_or_path",
            "name_or_path",
            "architectures",
            "auto_map",
            "transformers_version",
            "model_type",
        ),
        *("dtype", "torch_dtype", "quantization_config", "compression_config", "tie_word_embeddings"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "finetuning_task"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache"),
        *("attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"),
        *("embd_pdrop", "attn_pdrop", "resid_pdrop", "classifier_dropout", "dropout", "layerdrop"),
        *("initializer_range", "initializer_factor", "router_aux_loss_coef", "router_jitter_noise"),
        *("gradient_checkpointing", "chunk_size_feed_forward", "pretraining_tp", "is_encoder_decoder"),
        *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset"),
    }
)
_LENGTH: Final = "max_position_embeddings"
_SCALED: Final = frozenset({"dynamic", "longrope", "yarn"})  # rotary embeddings that depend on the length
_log = logging.getLogger("delta_weight_sync")


def require_same(model: str, revision: str | None, checkpoint: Path, engine: str) -> None:
    """Raise `EngineError` unless a version's config computes as the one that an engine was started with.

    Args:
        model: The folder or repository with which the engine was started.
        revision: Of the repository; None: its newest.
        checkpoint: The folder of a version. An adapter's has no config of a model.
        engine: The engine's name.
    """
    file = checkpoint / _FILE
    started = _read(model, revision) if file.exists() else {}
    if started and (found := difference(started, json.loads(file.read_text()))):
        raise EngineError(
            f"{found}: {engine} was started with another model of the same shapes; start it with the run's"
            " own, which `delta-weight-sync checkout` writes",
            RouteError.kind,
        )


@cache
def _read(model: str, revision: str | None) -> dict[str, Any]:
    """The `config.json` of a folder or a repository; empty, with a warning, if it cannot be read."""
    from transformers import PretrainedConfig

    found: dict[str, Any] = {}
    why = f"it has no {_FILE}"
    try:
        found = PretrainedConfig.get_config_dict(model, revision=revision)[0]
    except (OSError, ValueError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
    if not found:
        _log.warning("the config of %s is not compared with the run's: %s", model, why)
    return found


def difference(started: Mapping[str, Any], published: Mapping[str, Any]) -> str:
    """The first field by which two configs compute differently, with its values; "" if there is none."""
    kind = started.get("model_type")
    if kind != published.get("model_type"):
        return f"model_type is {kind}, but {published.get('model_type')} in the run"
    known, other = map(_flat, _complete(started, published))
    if not _SCALED & {value for config in (known, other) for value in config.values() if type(value) is str}:
        known, other = map(_without_length, (known, other))
    for name in sorted({*known, *other}):
        if known.get(name) != other.get(name):
            return f"{name} is {known.get(name)}, but {other.get(name)} in the run"
    return ""


def _complete(*configs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The configs of one kind of model with all defaults, in the form of this release of transformers, if it
    knows the model. Otherwise all fields, as they are."""
    from transformers import CONFIG_MAPPING

    kind = configs[0].get("model_type")
    if kind not in CONFIG_MAPPING:
        return [*configs]
    try:
        return [_fields(CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(config)))) for config in configs]
    except Exception:  # noqa: BLE001 - a few of transformers' classes do not read what they write
        return [*configs]


def _fields(config: Any) -> dict[str, Any]:
    """The fields that the class of the config knows. Others, such as `unsloth_fixed`, change no token."""
    from transformers import PretrainedConfig

    values = config.to_dict()
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        name: _fields(value) if isinstance(value, PretrainedConfig) else values.get(name)
        for name, value in found.items()
    }


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields that count, by their paths."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in _IGNORED:
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[prefix + name] = value
    return found


def _without_length(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name.rpartition(".")[2] != _LENGTH}
