"""Publish only the weights that changed, through a bucket; vLLM replicas patch them into their live ones."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from delta_weight_sync.errors import DeltaWeightSyncError

if TYPE_CHECKING:
    from delta_weight_sync.history import RunReader, open_run
    from delta_weight_sync.publish.publisher import Publisher
    from delta_weight_sync.publish.weight_transfer import BucketWeightTransfer
    from delta_weight_sync.store import open_bucket

__version__ = "0.2.0"
__all__ = [
    "BucketWeightTransfer",
    "DeltaWeightSyncError",
    "Publisher",
    "RunReader",
    "__version__",
    "open_bucket",
    "open_run",
]

# Imported at the first use: who only names the package waits for neither torch nor numba.
_HOMES = {
    "BucketWeightTransfer": "delta_weight_sync.publish.weight_transfer",
    "Publisher": "delta_weight_sync.publish.publisher",
    "RunReader": "delta_weight_sync.history",
    "open_bucket": "delta_weight_sync.store",
    "open_run": "delta_weight_sync.history",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
