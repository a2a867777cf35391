"""Tests of the trainer and of the publishing half."""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns of what it calls experimental
