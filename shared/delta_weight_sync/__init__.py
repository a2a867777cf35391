"""Publish, through a bucket, only the weights that changed, and read them anywhere.

Train with `Publisher` or, in TRL, with `BucketWeightTransfer`. Any engine keeps up with a run by `follow`;
vLLM servers patch their live weights with the plugin of this package. `Run` reads any version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from delta_weight_sync import errors
from delta_weight_sync.errors import *  # noqa: F403

if TYPE_CHECKING:
    from delta_weight_sync.callback import PublishCallback
    from delta_weight_sync.checkout import FollowedVersion, FollowedVersions, follow
    from delta_weight_sync.differences import TensorDiff
    from delta_weight_sync.publish.publisher import Publisher
    from delta_weight_sync.publish.sharding import Peers
    from delta_weight_sync.publish.states import StateRecord
    from delta_weight_sync.publish.undo import UndoLog
    from delta_weight_sync.records import AnchorRef, DeltaRef, FileRef, Manifest, Recipe, Tag
    from delta_weight_sync.run import Run
    from delta_weight_sync.trl.transfer import BucketWeightTransfer

__version__ = "0.2.0"
__all__ = [
    *errors.__all__,
    "AnchorRef",
    "BucketWeightTransfer",
    "DeltaRef",
    "FileRef",
    "FollowedVersion",
    "FollowedVersions",
    "Manifest",
    "Peers",
    "PublishCallback",
    "Publisher",
    "Recipe",
    "Run",
    "StateRecord",
    "Tag",
    "TensorDiff",
    "UndoLog",
    "__version__",
    "follow",
]

# Imported at first use, so that `import delta_weight_sync` loads neither torch nor numba.
_HOMES = {
    "AnchorRef": "delta_weight_sync.records",
    "BucketWeightTransfer": "delta_weight_sync.trl.transfer",
    "DeltaRef": "delta_weight_sync.records",
    "FileRef": "delta_weight_sync.records",
    "FollowedVersion": "delta_weight_sync.checkout",
    "FollowedVersions": "delta_weight_sync.checkout",
    "Manifest": "delta_weight_sync.records",
    "Peers": "delta_weight_sync.publish.sharding",
    "PublishCallback": "delta_weight_sync.callback",
    "Publisher": "delta_weight_sync.publish.publisher",
    "Recipe": "delta_weight_sync.records",
    "Run": "delta_weight_sync.run",
    "StateRecord": "delta_weight_sync.publish.states",
    "Tag": "delta_weight_sync.records",
    "TensorDiff": "delta_weight_sync.differences",
    "UndoLog": "delta_weight_sync.publish.undo",
    "follow": "delta_weight_sync.checkout",
}
_EXTRAS = {
    "BucketWeightTransfer": "trl",
    "Peers": "torch",
    "PublishCallback": "trl",
    "Publisher": "torch",
    "StateRecord": "torch",
    "UndoLog": "torch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if name in _EXTRAS:
            raise errors.MissingExtraError(name, _EXTRAS[name], error) from error
        raise


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
