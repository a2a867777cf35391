"""A program for test_engine.py: one engine of vLLM in this process, stepped by hand, that takes commits.

    python -m tests.live.engine <folder>

The folder holds the checkpoints `base` and `next`, and `delta`, which leads from one to the other. Prints one
line of JSON for each part. The engine schedules one step ahead, as on a GPU: vLLM turns that off on a CPU,
though its scheduler and model runner can do it; here it is turned on again.
"""

import gc
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput
from vllm.platforms.cpu import CpuPlatform

from delta_weight_sync.vllm import METHOD, _step_commit

# At each start vLLM replaces its Triton kernels in all modules, and stumbles over numba's: once is enough.
getattr(CpuPlatform, "register_triton_kernel_overrides", lambda: None)()  # vLLM 0.29 and 0.30 have none
CpuPlatform.register_triton_kernel_overrides = lambda *_: None

from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.vllm import memory as live_memory

TOKENS = 8
BLOCK = 32
PROMPTS = [[5 + i, 6, 7] * 4 for i in range(3)]
LONG = [3 + 37 * i % 200 for i in range(2 * BLOCK)]
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def schedule_ahead() -> None:
    plain = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        plain(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


class Engine:
    """vLLM with our weight transfer, one step at a time."""

    def __init__(self, checkpoint: Path, **options: Any) -> None:
        self._llm = LLM(
            str(checkpoint),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=512,
            block_size=BLOCK,
            kv_cache_memory_bytes=32 << 20,
            distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
            **{"enable_chunked_prefill": False, **options},
        )
        self.core = self._llm.llm_engine.engine_core.engine_core
        self.model = self.core.model_executor.driver_worker.worker.model_runner.model
        self.shapes = {name: list(bits.shape) for name, bits in read_bits(checkpoint)}
        self._asked = 0

    def learn(self) -> str:
        return self.call("learn", shapes=self.shapes)["digest"]

    def stage(self, **what: Any) -> None:
        self.call("stage", **what)
        assert self.call("staged")["done"], "it answers when staging has ended"

    def commit(self, digest: str, label: str) -> None:
        self.call("commit", digest=digest, label=label)

    def take(self, digest: str, label: str, **what: Any) -> None:
        self.stage(**what)
        self.commit(digest, label)

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        answers = self.core.collective_rpc(METHOD, kwargs={"op": op, **arguments})
        (answer,) = answers.result() if isinstance(answers, Future) else answers
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, prompt: list[int], tokens: int) -> str:
        self._asked += 1
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        name = str(self._asked)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def step(self) -> list[RequestOutput]:
        return self._llm.llm_engine.step()

    def until(self, name: str, tokens: int | None = None) -> RequestOutput:
        """Step until that request has this number of tokens (None: all)."""
        while True:
            for output in self.step():
                done = output.finished if tokens is None else len(output.outputs[0].token_ids) >= tokens
                if output.request_id == name and done:
                    return output

    def drain(self) -> Iterator[RequestOutput]:
        while self._llm.llm_engine.has_unfinished_requests():
            yield from (output for output in self.step() if output.finished)

    def answers(self) -> list[Any]:
        """Tokens and logprobs for each prompt, with nothing cached."""
        self.forget()
        return [facts(self.until(self.ask(prompt, TOKENS)))["logprobs"] for prompt in PROMPTS]

    def forget(self) -> None:
        _step_commit.forget_prefixes(self.core.scheduler.kv_cache_manager, [])

    def memory(self) -> str:
        tensors = {name: p.detach().reshape(-1) for name, p in self.model.named_parameters()}
        bits = {name: p.view(dtype=torch.int16).numpy().view("uint16") for name, p in tensors.items()}
        return to_hex(state_digest(bits))


def facts(output: RequestOutput) -> dict[str, Any]:
    (choice,) = output.outputs
    steps = zip(choice.logprobs, choice.token_ids, strict=True)
    logprobs = [(token, step[token].logprob) for step, token in steps]
    spans = [(span.version, span.start, span.end) for span in getattr(choice, "weight_versions", ())]
    return {"prompt": output.prompt_token_ids[0], "logprobs": logprobs, "spans": spans}


def labels(engine: Engine) -> Iterator[dict[str, Any]]:
    """All prompts side by side; after each number of steps the final norm is halved, as version "new"."""
    norm = engine.model.model.norm.weight.data
    for commit_after in (None, *range(1, TOKENS)):
        before = norm.clone()
        under_way = 0
        engine.core._weight_version = "old"
        engine.forget()
        for prompt in PROMPTS:
            engine.ask(prompt, TOKENS)
        finished = []
        for _ in range(commit_after or 0):
            finished += [output for output in engine.step() if output.finished]
        if commit_after:
            under_way = len(engine.core.batch_queue)
            _step_commit.commit(
                engine.core, lambda norm=norm: norm.mul_(0.5) is None or [{"waited_s": 0.0}], "new"
            )
        finished += engine.drain()
        norm.copy_(before)
        for output in finished:
            yield {"commit_after": commit_after, "under_way": under_way, **facts(output)}


def commits(engine: Engine, folder: Path, digest: str) -> dict[str, Any]:
    """A commit with the wrong digest, one whose last write goes wrong, and a good one."""
    memory = engine.memory()
    answers = engine.answers()
    deltas = [str(folder / "delta")]
    found: dict[str, Any] = {"before": answers}
    found["wrong_digest"] = refused(lambda: engine.take("0" * 16, "1", deltas=deltas))
    put = live_memory._put
    live_memory._put = lambda *changes: put(*changes) + 1
    found["wrong_write"] = refused(lambda: engine.take(digest, "1", deltas=deltas))
    live_memory._put = put
    found["undone"] = engine.memory() == memory
    found["as_before"] = engine.answers() == answers
    engine.take(digest, "1", deltas=deltas)
    found["after"] = engine.answers()
    return found


def refused(commit: Any) -> str:
    try:
        commit()
    except Exception as error:  # noqa: BLE001 - it is what is asked for
        return str(error)
    return ""


def chase(engine: Engine, commit: Any) -> dict[str, Any]:
    """Prompts that begin like a request which runs through a commit, each some blocks longer than the last.

    The first should find nothing, although all of it was cached before the commit; each later one what the
    one before it computed, and nothing of the running request, although from the commit on that one has
    filled blocks with the very tokens that are asked for.
    """
    engine.forget()
    engine.until(engine.ask(LONG, 1))
    cached = engine.until(engine.ask(LONG, 1)).num_cached_tokens
    runs = engine.ask(LONG, 8 * BLOCK)
    engine.until(runs, BLOCK)
    commit()
    filled = engine.until(runs, 5 * BLOCK).outputs[0].token_ids
    prompts = [[*LONG, *filled[: length * BLOCK + 1]] for length in (1, 3, 5)]
    found = [(output.num_cached_tokens, facts(output)["logprobs"]) for output in follow(engine, prompts)]
    beside = [output.request_id for output in engine.drain()] == [runs]
    return {"cached": cached, "beside": beside, "prompts": prompts, "found": found}


def follow(engine: Engine, prompts: list[list[int]]) -> list[RequestOutput]:
    return [engine.until(engine.ask(prompt, 1)) for prompt in prompts]


def main(folder: Path) -> None:
    schedule_ahead()
    gc.freeze()  # vLLM collects garbage at each start, which would go through all that was imported
    engine = Engine(folder / "base")
    base, digest = (to_hex(state_digest(dict(read_bits(folder / name)))) for name in ("base", "next"))
    say("loaded", engine.learn())
    say("labels", list(labels(engine)))
    say("commits", commits(engine, folder, digest))
    engine.take(base, "2", deltas=[str(folder / "back")])
    say("back", engine.answers())
    chased = chase(engine, lambda: engine.take(digest, "3", deltas=[str(folder / "delta")]))
    say("chase", chased)
    say("healed", heal(engine, folder, digest))

    fresh = Engine(folder / "next")
    say("fresh", {"digest": fresh.learn(), "answers": fresh.answers()})
    fresh.forget()
    found = [(o.num_cached_tokens, facts(o)["logprobs"]) for o in follow(fresh, chased["prompts"])]
    say("chase_fresh", found)
    shared = {"shared_storage_path": tempfile.mkdtemp()}
    keeping = Engine(folder / "base", kv_transfer_config={**CONNECTOR, "kv_connector_extra_config": shared})
    say("connector", refused(keeping.learn))


def heal(engine: Engine, folder: Path, digest: str) -> dict[str, Any]:
    """Something else wrote to parameters: deltas are refused; comparing with a checkpoint repairs them."""
    memory = engine.memory()
    engine.model.model.layers[0].mlp.down_proj.weight.data[3] = 1.0
    engine.model.model.norm.weight.data.zero_()
    for _ in range(live_memory.SLICES):  # what a minute brings
        engine.core.model_executor.driver_worker.worker._delta_worker.weights.memory.recheck()
    found = {"refused": refused(lambda: engine.stage(deltas=[str(folder / "back")]))}
    engine.take(digest, "4", checkpoint=str(folder / "next"))
    return found | {"as_before": engine.memory() == memory, "whole": refused(lambda: engine.stage(deltas=[]))}


def say(name: str, what: Any) -> None:
    print(json.dumps({name: what}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
