"""A program for tests: a model that vLLM's own loader quantizes, and random deltas, against fresh loads.

    python -m tests.vllm.schemes <rank> <ranks> <port> <deltas> <folder> <case>...

A case is `checkpoint:quantization`, the name of a checkpoint in `folder` and a value of `--quantization`, or
`checkpoint:quantization:trouble`, a key of `TROUBLE`. Prints a line of JSON for each: what was found. There
is no engine, because most schemes have no kernel for a CPU; vLLM quantizes all the same. The CPU build lacks
one op, for which `only_quantizing` has the same formula.
"""

import gc
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(VLLM_PLUGINS="", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker import cpu_model_runner

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import WEIGHTS, read_bits, write_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.vllm import cpu, plugin, routes
from delta_weight_sync.vllm.memory import Step

State = dict[str, np.ndarray]
LIMIT = 0x3F80  # 1.0: no weight becomes larger


def only_quantizing() -> None:
    """Let vLLM choose kernels whose forward needs a GPU: their layouts are compared, but nothing runs."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.experts import triton_moe
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int8
    from vllm.model_executor.layers.quantization.online import fp8 as online_fp8
    from vllm.model_executor.layers.quantization.online import int8 as online_int8
    from vllm.platforms import PlatformEnum

    def scaled_fp8_quant(x: Any, scale: Any = None, use_per_token_if_dynamic: bool = False, **_: Any) -> Any:
        if scale is None:
            amax = x.float().abs()
            amax = amax.amax(1, keepdim=True) if use_per_token_if_dynamic else amax.amax().reshape(1)
            scale = (amax / 448).clamp_min(1 / (448 * 512))
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    ops.scaled_fp8_quant = scaled_fp8_quant
    block = linear.TritonFp8BlockScaledMMKernel
    block.is_supported = classmethod(lambda cls, capability=None: (True, None))
    block.can_implement = classmethod(lambda cls, config: (True, None))
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(block)
    linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [linear.EmulationMxfp8LinearKernel]
    experts = triton_moe.TritonExperts
    online_fp8.select_fp8_moe_backend = lambda **_: (fp8.Fp8MoeBackend.TRITON, experts)
    online_int8.select_int8_moe_backend = lambda **_: (int8.Int8MoeBackend.TRITON, experts)


class Worker:
    """As a worker of vLLM looks to the plugin: a configuration, and a model loaded from a checkpoint."""

    ranks = (0, 1, 0)  # rank, ranks, port

    def __init__(self, folder: Path, scheme: str, **more: Any) -> None:
        rank, ranks, port = self.ranks
        options = {"model": str(folder), "dtype": "bfloat16", "quantization": scheme or None}
        options |= {"enforce_eager": True, "max_model_len": 64, "skip_tokenizer_init": True, **more}
        options |= {"tensor_parallel_size": ranks, "attention_backend": "CPU_MLA"}
        options |= {"distributed_executor_backend": "mp" if ranks > 1 else "uni"}
        self.vllm_config = EngineArgs(**options).create_engine_config()
        self.vllm_config.parallel_config.rank = rank
        with set_current_vllm_config(self.vllm_config):
            if not parallel_state.model_parallel_is_initialized():
                address = f"tcp://127.0.0.1:{port}"
                parallel_state.init_distributed_environment(ranks, rank, address, rank, backend="gloo")
                parallel_state.initialize_model_parallel(ranks)
            self.model = get_model(vllm_config=self.vllm_config)

    def get_model(self) -> torch.nn.Module:
        return self.model

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        answer = plugin._call(self, op=op, **arguments)
        while answer.get("done") is False:
            answer = self._delta_worker.staging.result()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def memory(self) -> dict[str, bytes]:
        """All bytes that the model holds."""
        held = dict(routes.held(self.model.named_modules(), 6))
        return {name: bytes_of(tensor) for name, tensor in held.items() if not tensor.is_meta}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def moved(state: State, rng: np.random.Generator, density: float) -> State:
    """Most changes are one step, as in training; a few are large, so that scales change."""
    new = {}
    for name, bits in state.items():
        flat = bits.reshape(-1).copy()
        index = rng.choice(flat.size, max(1, rng.binomial(flat.size, density)), replace=False)
        step = rng.choice([1, -1, 3, -3], index.size)
        step = np.where(rng.random(index.size) < 0.02, rng.integers(-200, 200, index.size), step)
        after = (flat[index].astype(np.int64) + step).astype(np.uint16)
        flat[index] = np.where((after & 0x7FFF) < LIMIT, after, flat[index])
        new[name] = flat.reshape(bits.shape)
    return new


def write(state: State, like: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    write_bits({name: bits.shape for name, bits in state.items()}, state.__getitem__, folder / WEIGHTS)
    return folder


def little_memory(live: Worker) -> None:
    mock.patch("psutil.virtual_memory", return_value=mock.Mock(available=1000)).start()


def damaged(live: Worker) -> None:
    """As if vLLM quantized differently while it loaded."""
    next(p for p in live.model.parameters() if p.element_size() == 1).data.view(torch.uint8)[0] += 1


def hidden(live: Worker) -> None:
    """As if a kernel kept its weights in memory of its own."""
    for module in live.model.modules():
        if getattr(module, "quant_method", None) and module.quant_method.uses_meta_device:
            pack(module.quant_method.process_weights_after_loading, module)
            kind = type(module.quant_method)
            plain = kind.process_weights_after_loading
    mock.patch.object(kind, "process_weights_after_loading", lambda *args: pack(plain, *args)).start()


def pack(plain: Any, *args: Any) -> None:
    plain(*args)
    args[-1].packed = bytes_of(args[-1].weight)
    args[-1].weight = None


TROUBLE = {"": lambda live: None, "memory": little_memory, "damaged": damaged, "hidden": hidden}
IGNORED = {"ignore": {"quantization_config": {"ignore": ["re:.*kv_b_proj"]}}}


def examine(base: Path, scheme: str, trouble: str, deltas: int) -> dict[str, Any]:
    """Everything that the tests assert about one case."""
    rng = np.random.default_rng(0)
    options = IGNORED.get(trouble, {})
    live = Worker(base, scheme, **options)
    scratch = base.parent / f"scratch{live.ranks[0]}"
    loaded = live.memory()
    TROUBLE.get(trouble, TROUBLE[""])(live)
    state = dict(read_bits(base)) if scheme else {}
    shapes = {name: list(bits.shape) for name, bits in state.items()}
    try:
        live.call("warm")
        learned = live.call("learn", shapes=shapes)
    except RuntimeError as error:
        again = refused(lambda: live.call("learn", shapes=shapes))
        return {"refused": str(error), "refused_again": again}
    finally:
        mock.patch.stopall()
    found = {
        "learned": learned["digest"] == to_hex(state_digest(state)),
        "wrote": loaded != live.memory(),
        "scheme": learned["quantized"]["scheme"],
        "unequal": [],
        "not_undone": 0,
        "loads": 0,
        "changes": 0,
        "bytes": 0,
    }
    staged_s = 0.0
    committed_s = 0.0
    for turn in range(1, deltas + 1):
        some = [*state] if turn % 2 else [*rng.choice([*state], len(state) // 4, replace=False)]
        new = state | moved({name: state[name] for name in some}, rng, 0.01)
        patches = [codec.diff(name, state[name], new[name]) for name in some]
        digest = to_hex(state_digest(new))
        path = scratch.with_suffix(".delta")
        encoding = ("fast", "small")[turn % 2]
        path.write_bytes(codec.encode(patches, state.__getitem__, base=0, version=1, encoding=encoding))
        if turn % 3 == 0:  # a commit that fails, and a stage that is not committed
            before = live.memory()
            live.call("stage", deltas=[str(path)])
            fail(live._delta_worker)
            found["not_undone"] += not refused(lambda: live.call("commit", digest=digest, label="1"))  # noqa: B023
            live.call("stage", deltas=[str(path)])
            found["not_undone"] += before != live.memory()
        staged_s += live.call("stage", deltas=[str(path)])["stage_s"]
        answer = live.call("commit", digest=digest, label="1")
        committed_s += answer["commit_s"]
        found["changes"] += sum(patch.index.size for patch in patches)
        found["bytes"] += answer["quantized"]["changed"]
        state = new
        if turn % 10 == 0:
            fresh = Worker(write(state, base, scratch), scheme, **options)
            mine = live.memory()
            theirs = fresh.memory()
            found["unequal"] += [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
            facts = fresh.call("learn", shapes=shapes)
            if facts["quantized"]["digest"] != answer["quantized"]["digest"]:
                found["unequal"].append("the digest of the quantized tensors")
            found["loads"] += 1
    # As after a failure of another worker: a stage that is not committed, and the run is learned again.
    new = moved(state, rng, 0.01)
    patches = [codec.diff(name, state[name], new[name]) for name in state]
    path.write_bytes(codec.encode(patches, state.__getitem__, base=0, version=1))
    live.call("stage", deltas=[str(path)])
    again = live.call("learn", shapes=shapes)
    found["learned_again"] = again["digest"] == digest
    return found | {
        "healed": healed(live, state, base, scratch),
        "stage_s": staged_s,
        "commit_s": committed_s,
    }


def fail(worker: Any) -> None:
    """Make the last step of what is staged fail, after it has written."""
    *steps, last = worker._staged.steps
    worker._staged = worker._staged._replace(steps=[*steps, Step(lambda: (last.do()[0] + 1, 0.0), last.undo)])


def refused(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def healed(live: Worker, state: State, base: Path, scratch: Path) -> dict[str, Any]:
    """Something else writes to a quantized weight: deltas are refused, and a checkpoint repairs it."""
    before = live.memory()
    worker = live._delta_worker
    damaged = worker._twin._modules[next(iter(worker._twin.layers))]
    name, weight = next((n, p) for n, p in damaged.named_parameters() if p.element_size() == 1)
    weight.data.view(torch.uint8)[0].bitwise_xor_(1)
    for _ in range(60):  # what a minute brings
        worker.weights.recheck()
    found = {"refused": refused(lambda: live.call("stage", deltas=[]))}
    live.call("stage", checkpoint=str(write(state, base, scratch)))
    live.call("commit", digest=to_hex(state_digest(state)), label="2")
    return found | {"damaged": name, "repaired": before == live.memory()}


def main(deltas: int, folder: Path, cases: list[str]) -> None:
    """See the module's text."""
    cpu_model_runner._set_torch_accelerator_to_noop()  # as vLLM's worker does before it loads
    cpu.install()
    routes.install()
    only_quantizing()
    torch.set_num_threads(1)
    gc.freeze()  # vLLM collects garbage at each load, which would go through all that was imported
    os.environ["VLLM_DIST_IDENT"] = str(Worker.ranks[-1])
    for case in cases:
        checkpoint, scheme, *trouble = case.split(":")
        started = time.perf_counter()
        found = examine(folder / checkpoint, scheme, "".join(trouble), deltas)
        print(json.dumps({"case": case, "seconds": time.perf_counter() - started, **found}), flush=True)


if __name__ == "__main__":
    Worker.ranks = tuple(map(int, sys.argv[1:4]))
    main(int(sys.argv[4]), Path(sys.argv[5]), sys.argv[6:])
