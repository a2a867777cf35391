"""Train, publish and follow in one script: both ends hold the same bits at every version.

    python docs/examples/minimal.py trainer/policies/wordle-tiny file:///tmp/bucket#minimal

The two halves meet only at the bucket's URL, so each could run on a machine of its own.
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM

from delta_weight_sync import Publisher, follow


def main(policy: str, url: str) -> None:
    """Learn random tokens by heart in five steps, and follow each step."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(model.config.vocab_size, (4, 32))

    with (
        Publisher(url, base=policy) as publisher,
        tempfile.TemporaryDirectory() as folder,
        follow(url, into=f"{folder}/policy") as versions,
    ):
        for step in range(6):
            if step:
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            publisher.publish(model, step)  # returns once it knows what changed
            newest = publisher.flush()  # waits for the bucket; a real loop trains on instead

            held = next(versions)  # an ordinary checkpoint, verified by its digest
            assert held.digest == newest.digest == publisher.digest(model)
            policy_then = AutoModelForCausalLM.from_pretrained(held.path, dtype=torch.bfloat16)
            for name, weight in policy_then.named_parameters():
                assert torch.equal(weight, model.get_parameter(name).to(torch.bfloat16)), name

            sent = sum(file.size for file in newest.delta or newest.anchor.weights)
            changed = newest.changed if newest.delta else newest.total
            print(
                f"version {newest.version}: {changed} of {newest.total} weights, {sent} bytes, {held.digest}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
