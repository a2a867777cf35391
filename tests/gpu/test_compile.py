"""All kernels compile for an A100 and an H100."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full  # Triton imported again, and 13 compilations


@pytest.mark.parametrize("architecture", ["80", pytest.param("90", marks=pytest.mark.long)])
def test_there_is_machine_code_for_gpus(tmp_path, architecture):
    """In a process of its own: in this one Triton interprets. Whole tiles are read 16 bytes at a time."""
    # Without a choice of FP fusion Triton warns that its default will change.
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    words = [sys.executable, "-m", "tests.gpu.compiled", architecture]
    said = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    kernels = json.loads(said.stdout)
    assert all(kernel["machine code"] for kernel in kernels.values())
    whole = {"find bf16, whole", "find fp32, whole", "digest of whole tiles"}
    assert {name for name, kernel in kernels.items() if kernel["16 bytes"]} == whole
