"""A program for test_commit.py: commits at each moment of an engine that schedules ahead, as on a GPU.

vLLM turns asynchronous scheduling off on a CPU, though its scheduler and model runner can do it; here it is
turned on again. The engine runs in this process, so that a commit can be made after a chosen number of steps,
while the next step is already under way. Prints one JSON object per completion.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

from inference_space import step_commit  # noqa: E402

TOKENS = 8
PROMPTS = [[5 + i, 6, 7] * 4 for i in range(3)]
REPORT = Path(tempfile.mkdtemp()) / "commit.json"


def schedule_ahead() -> None:
    plain = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config):
        plain(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def complete(llm: LLM, commit_after: int | None) -> list[dict]:
    """All prompts side by side; after `commit_after` steps the final norm is halved, as version "new"."""
    core = llm.llm_engine.engine_core.engine_core
    norm = core.model_executor.driver_worker.worker.model_runner.model.model.norm.weight
    before, core._weight_version = norm.data.clone(), "old"
    for prompt in PROMPTS:
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        llm.llm_engine.add_request(f"{commit_after} {prompt[0]}", {"prompt_token_ids": prompt}, sampling)
    finished, steps, under_way = [], 0, 0
    while llm.llm_engine.has_unfinished_requests():
        if steps == commit_after:
            under_way = len(core.batch_queue)
            step_commit.commit(core, lambda: norm.data.mul_(0.5), {"version": "new", "report": str(REPORT)})
        finished += [output for output in llm.llm_engine.step() if output.finished]
        steps += 1
    norm.data.copy_(before)
    step_commit.forget_prefixes(core.scheduler.kv_cache_manager, [])
    return [{"under_way": under_way, **_facts(output.outputs[0], output)} for output in finished]


def _facts(choice, output) -> dict:
    logprobs = [step[token].logprob for step, token in zip(choice.logprobs, choice.token_ids, strict=True)]
    spans = [(span.version, span.start, span.end) for span in choice.weight_versions]
    return {"prompt": output.prompt_token_ids[0], "logprobs": logprobs, "spans": spans}


def main(model: str) -> None:
    schedule_ahead()
    llm = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        enable_chunked_prefill=False,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
    )
    for commit_after in (None, *range(1, TOKENS)):
        for facts in complete(llm, commit_after):
            print(json.dumps({"commit_after": commit_after, **facts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
