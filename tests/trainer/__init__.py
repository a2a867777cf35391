"""Tests of the trainer."""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns of what it calls experimental
