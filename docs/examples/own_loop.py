"""Publish the weights of your own training loop; at each step, only changed weights go to the bucket.

    python docs/examples/own_loop.py trainer/policies/wordle-tiny file:///tmp/bucket#own
    torchrun --nproc-per-node 2 docs/examples/own_loop.py trainer/policies/wordle-tiny file:///tmp/bucket#own

The first argument is a model of the Hub or, as here, the folder of a checkpoint. With several processes the
parameters are sharded: every rank makes the same calls, and publishes its own tensors. Stop the script at
any moment and start it again: the run resumes as if nothing had happened.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from delta_weight_sync import Publisher


def main(policy: str, url: str, steps: int = 5) -> None:
    """Learn random tokens by heart, in up to `steps` steps."""
    if "RANK" in os.environ:  # torchrun started this process
        dist.init_process_group()
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    torch.manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (4, 32))

    with Publisher(url, base=policy) as publisher:
        done = publisher.restore(model, optimizer)
        if done is None:  # the run begins
            done = {"step": 0}
            publisher.publish(model, step=0)
            publisher.save_state(model, optimizer, extra=done)
        for step in range(done["step"] + 1, int(steps) + 1):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(model, step)
            publisher.log_metrics({"loss": loss.item()}, step)  # for the dashboard
            end = step == int(steps)  # before the end, a state is saved every few minutes
            publisher.save_state(model, optimizer, extra={"step": step}, final=end)
        newest = publisher.flush()
        print(f"version {newest.version}: {newest.changed} of {newest.total} weights changed")

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
