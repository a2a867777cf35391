"""One root for all errors, and a package that is named without being loaded."""

import subprocess
import sys

import pytest

import delta_weight_sync
from delta_weight_sync.errors import (
    AccessDeniedError,
    BucketError,
    CodecError,
    FencedError,
    PeerError,
    ProtocolError,
)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (AccessDeniedError, RuntimeError),
        (BucketError, RuntimeError),
        (CodecError, ValueError),
        (FencedError, RuntimeError),
        (PeerError, RuntimeError),
        (ProtocolError, ValueError),
    ],
)
def test_every_error_has_the_root_and_a_builtin(error, builtin):
    assert issubclass(error, delta_weight_sync.DeltaWeightSyncError)
    assert issubclass(error, builtin)


def test_naming_the_package_loads_neither_torch_nor_a_backend():
    heavy = "{'torch', 'trl', 'vllm', 'transformers', 'numba', 'numpy'}"
    code = f"import sys, delta_weight_sync as d; assert not {heavy} & set(sys.modules); print(d.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == delta_weight_sync.__version__


def test_what_is_offered_is_there():
    for name in delta_weight_sync.__all__:
        assert getattr(delta_weight_sync, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'publisher_of_old'"):
        delta_weight_sync.publisher_of_old  # noqa: B018
