#!/bin/sh
# Python for vLLM's engine. The engine gets only the variables that it needs, so none of the Space's secrets,
# whatever their names. It reads local files only, so access to the Hub is off.
exec "$ENGINE_PYTHON" -ISc '
import os, re, sys
needed = "(ATEN|CUDA|CUBLAS|CUDNN|DG|FI|FLASHINFER|GLOO|HIP|HSA|KMP|LC|LD|MALLOC|MKL|NCCL|NUMBA|NVIDIA|NVSHMEM|OMP"
needed += "|ONEDNN|OPENBLAS|PYTHON|PYTORCH|ROCM|ROCR|TOKENIZERS|TORCH|TORCHINDUCTOR|TRANSFORMERS|TRITON|UCX|VLLM|XDG)_.*"
needed += "|PYTHON[A-Z]*|HF_HOME|HOME|LANG|LOGNAME|PATH|SHELL|TERM|TMPDIR|TZ|USER|CC|CXX|.*INCLUDE_PATH|LIBRARY_PATH"
secret = "TOKEN(?!IZERS)|SECRET|KEY|PASSWORD|CREDENTIAL"
kept = {n: v for n, v in os.environ.items() if re.fullmatch(needed, n) and not re.search(secret, n)}
# The first variable must never change: setproctitle finds the memory for the name of the process by it.
os.execve(os.environ["ENGINE_PYTHON"], [os.environ["ENGINE_PYTHON"], *sys.argv[1:]], {"HF_HUB_OFFLINE": "1"} | kept)
' "$@"
