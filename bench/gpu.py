"""On a GPU: diff and pack of the Qwen3-0.6B-shaped set, the commit's scatter, and the digest of all weights.

Runs where torch sees a CUDA device; elsewhere the section says that it is unmeasured.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch

from bench import deltas
from bench.change import Change
from bench.model import prepared, whole_parts
from bench.results import Results
from bench.timing import Work
from delta_weight_sync.digest_torch import tensor_digest as digest
from delta_weight_sync.publish.mirror import Mirror
from delta_weight_sync.vllm import scatter
from delta_weight_sync.vllm.staging import Write, commit

_REPEATS = 10


def run(results: Results) -> dict[str, Any]:
    """GB/s and milliseconds, or why there are none."""
    if not torch.cuda.is_available():
        return {"unmeasured": "no GPU here"}
    return {"device": torch.cuda.get_device_name(), **measure(deltas.qwen(), torch.device("cuda"))}


def measure(change: Change, device: torch.device) -> dict[str, Any]:
    """Medians of each part, with the device's work finished; any device, so that it can be tried on a CPU."""
    live = {n: torch.from_numpy(bits).to(device).view(torch.bfloat16) for n, bits in change.old.items()}
    mirror, forth = Mirror("device"), [[prepared(live[patch.name], patch) for patch in change.patches]]
    for name, tensor in live.items():
        mirror.add(name, tensor)

    def turn() -> None:
        _put(forth[0])
        forth[0] = [Write(w.memory, w.index, w.new, w.old) for w in forth[0]]

    median = functools.partial(_median, finish=torch.cuda.synchronize if device.type == "cuda" else list)
    diff_s = median(lambda: mirror.keep(mirror.find(whole_parts(live.items()))), before=turn)
    commit_s = median(lambda: commit(forth[0], lambda failure: None))
    read_s = median(lambda: [scatter.moved(write.memory, write.index, write.new) for write in forth[0]])
    put_s = median(lambda: _put(forth[0]))
    digest_s = median(lambda: [digest(name, tensor.view(torch.int16)) for name, tensor in live.items()])
    return {
        "diff_gb_s": change.model_bytes / diff_s / 1e9,
        "commit_ms": 1e3 * commit_s,
        "read_ms": 1e3 * read_s,
        "put_ms": 1e3 * put_s,
        "digest_gb_s": change.model_bytes / digest_s / 1e9,
    }


def _put(writes: list[Write]) -> None:
    for write in writes:
        write.do()


def _median(work: Work, finish: Work, before: Work = lambda: None) -> float:
    measured = []
    for _ in range(_REPEATS + 1):
        before()
        finish()
        started = time.perf_counter()
        work()
        finish()
        measured.append(time.perf_counter() - started)
    return statistics.median(measured[1:])
