"""A plugin of SGLang for tests: while the file SGLANG_FAULT exists, the last write of a commit goes wrong."""

import os
from pathlib import Path
from typing import Any


def register() -> None:
    from delta_weight_sync.vllm import memory

    put = memory._put
    fault = Path(os.environ["SGLANG_FAULT"])

    def faulty(*changes: Any) -> int:
        return put(*changes) + fault.exists()

    memory._put = faulty
