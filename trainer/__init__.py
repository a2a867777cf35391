"""The trainer: TRL's asynchronous GRPO, and the publisher that puts the weights into the bucket."""

import os

# Silence TRL's warning that async GRPO is experimental, because `compat` warns of untested releases.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
