"""Publish, through a bucket, only the weights that changed, and read them anywhere.

Train with `Publisher` or, in TRL, with `BucketWeightTransfer`. Any engine reads a run with `follow`; vLLM
servers patch their live weights with the plugin of this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from delta_weight_sync import errors
from delta_weight_sync.errors import *  # noqa: F403

if TYPE_CHECKING:
    from delta_weight_sync.checkout import FollowedVersion, follow
    from delta_weight_sync.publish.publisher import Publisher
    from delta_weight_sync.reader import RunReader, open_run
    from delta_weight_sync.records import Manifest
    from delta_weight_sync.store import Bucket, open_bucket
    from delta_weight_sync.trl._transfer import BucketWeightTransfer

__version__ = "0.2.0"
__all__ = [
    *errors.__all__,
    "Bucket",
    "BucketWeightTransfer",
    "FollowedVersion",
    "Manifest",
    "Publisher",
    "RunReader",
    "__version__",
    "follow",
    "open_bucket",
    "open_run",
]

# Imported at first use, so that `import delta_weight_sync` loads neither torch nor numba.
_HOMES = {
    "Bucket": "delta_weight_sync.store",
    "BucketWeightTransfer": "delta_weight_sync.trl._transfer",
    "FollowedVersion": "delta_weight_sync.checkout",
    "Manifest": "delta_weight_sync.records",
    "Publisher": "delta_weight_sync.publish.publisher",
    "RunReader": "delta_weight_sync.reader",
    "follow": "delta_weight_sync.checkout",
    "open_bucket": "delta_weight_sync.store",
    "open_run": "delta_weight_sync.reader",
}
_EXTRAS = {"BucketWeightTransfer": "trl", "Publisher": "torch"}


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
