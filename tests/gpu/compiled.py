"""A program for tests: compiles all kernels for a GPU, where there is none; Triton brings all that it takes.

    python -m tests.gpu.compiled <architecture>

Prints a line of JSON: of each kernel, whether there is machine code, and whether it reads 16 bytes at a time.
"""

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from delta_weight_sync.publish import _gpu
from delta_weight_sync.vllm import gpu as replica

DIFF = {"entries": "*i64", "row_of": "*i32", "book": "*i64", "found": "*i32"}
FIND = DIFF | {"which": "*i32", "factors": "*i32", "nans": "*i16", "capacity": "i64"}
ROWS = {"rows": "*i64"}
CHANGED = ROWS | {"blocks": "*i64", "element": "*i32", "ulps": "*i16", "new": "*i16"}
HASHED = ROWS | {"tiles": "*i64", "inner": "*i32", "cells": "*i64"}
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {  # kernel, arguments, constants and options
    "find bf16, whole": (_gpu.find, FIND, {"kind": tl.int16, "whole": True}),
    "find fp32, whole": (_gpu.find, FIND, {"kind": tl.float32, "whole": True}),
    "find fp16, in part": (_gpu.find, FIND, {"kind": tl.float16, "whole": False}),
    "keep": (_gpu.keep, DIFF, {}),
    "add": (_gpu.add, {"addresses": "*i64", "ulps": "*i16", "old": "*i16", "count": "i32"}, {}),
    "digest of whole tiles": (replica.digest_whole, HASHED | {"count": "i32"}, {"num_warps": replica.WARPS}),
    "digest": (replica.digest, HASHED, {}),
    "read": (replica.read_kernel, ROWS | {"tiles": "*i64", "out": "*i16"}, {}),
    "look": (replica.look, CHANGED | {"inner": "*i32", "cells": "*i64"}, {}),
    "put": (replica.put, CHANGED, {"undo": False}),
    "undo": (replica.put, CHANGED, {"undo": True}),
    "check": (replica.check, {k: v for k, v in CHANGED.items() if k != "ulps"} | {"wrong": "*i64"}, {}),
}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> dict[str, bool]:
    options = {name: constants.pop(name) for name in constants.keys() - set(kernel.arg_names)}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    code = triton.compile(ASTSource(kernel, signature, constants), target=target, options=options).asm
    return {"machine code": bool(code["cubin"]), "16 bytes": "ld.global.v4.b32" in code["ptx"]}


if __name__ == "__main__":
    print(json.dumps({name: compiled(*kernel) for name, kernel in KERNELS.items()}))
