"""Score a checkpoint, for `delta-weight-sync evaluate`: the last line that it prints has the scores.

    delta-weight-sync evaluate file:///tmp/bucket#first --every 10 -- python docs/examples/evaluate.py {path}

This one measures how well the policy has learnt one text by heart. Put your own evaluation in its place.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main(checkpoint: str) -> None:
    """Print the loss on tokens that are the same for every version."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = torch.arange(32)[None] % model.config.vocab_size
    with torch.inference_mode():
        loss = model(input_ids=tokens, labels=tokens).loss
    print(json.dumps({"loss": loss.item()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
