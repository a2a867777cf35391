"""The trainer's kernels compile for a GPU where there is none: Triton brings all that it takes."""

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from delta_weight_sync.device import compare

TABLE = {"entries": "*i64", "owners": "*i32"}
ANSWER = {"book": "*i64", "found": "*i32"}
SIGNATURES = {
    "find": {
        **TABLE,
        **{"which": "*i32", "factors": "*i32", "nans": "*i16"},
        **ANSWER,
        **{"capacity": "i64", "kind": "constexpr", "whole": "constexpr"},
    },
    "keep": TABLE | ANSWER,
    "add": {"addresses": "*i64", "ulps": "*i16", "old": "*i16", "count": "i32"},
}
KERNELS = {
    "find bf16, whole": ("find", {"kind": tl.int16, "whole": True}),
    "find fp32, whole": ("find", {"kind": tl.float32, "whole": True}),
    "find fp16, in part": ("find", {"kind": tl.float16, "whole": False}),
    "keep": ("keep", {}),
    "add": ("add", {}),
}


@pytest.mark.parametrize(("kernel", "constants"), KERNELS.values(), ids=KERNELS)
def test_it_compiles_for_an_a100(kernel, constants, tmp_path, monkeypatch):
    """Full tiles are read 16 bytes at a time, which is what makes the diff as fast as the memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # or Triton warns that its default will change
    source = ASTSource(getattr(compare, kernel), SIGNATURES[kernel], constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
    assert compiled.asm["cubin"]
    if constants.get("whole"):
        assert "ld.global.v4.b32" in compiled.asm["ptx"]
