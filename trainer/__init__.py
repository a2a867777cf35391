"""The trainer box: TRL's asynchronous GRPO, and the publisher that puts its weights into the bucket."""

import os

# TRL warns at import that async GRPO is experimental; `compat` warns of releases that were not tested.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
