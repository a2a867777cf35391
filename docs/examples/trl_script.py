"""TRL's asynchronous GRPO with a vLLM that shares nothing with the trainer but a bucket.

    export RUN=hf://buckets/me/short#first
    export VLLM_PLUGINS=delta_weight_sync DELTA_WEIGHT_SYNC_RUN=$RUN
    vllm serve Qwen/Qwen3-0.6B --logprobs-mode processed_logprobs
    python docs/examples/trl_script.py Qwen/Qwen3-0.6B $RUN http://localhost:8000

vLLM may be on any machine that can read the bucket. To try this on a CPU, replace Qwen/Qwen3-0.6B by
`trainer/policies/wordle-tiny`, and set RUN=file:///tmp/bucket#first.
"""

import sys

import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from delta_weight_sync import BucketWeightTransfer

QUESTIONS = ["What is the sky?", "Why is grass green?", "Who are you?", "How are you?"]


def plain(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """The reward: the fewer different characters an answer has, the better."""
    return [-len(set(completion[-1]["content"])) / 10 for completion in completions]


def main(model: str, url: str, vllm: str, steps: int = 20) -> None:
    """Train for a few steps. After each step, changed weights go to the bucket, and from there to vLLM."""
    args = AsyncGRPOConfig(
        output_dir="trl_script",
        vllm_server_base_url=vllm,
        max_steps=int(steps),
        per_device_train_batch_size=16,
        max_completion_length=32,
        token_budget=0,
        use_cpu=not torch.cuda.is_available(),
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
    )
    transfer = BucketWeightTransfer(url, base=model)
    AsyncGRPOTrainer(
        model,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in QUESTIONS]}),
        reward_funcs=plain,
        weight_transfer=transfer,
        callbacks=[transfer.metrics()],
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
