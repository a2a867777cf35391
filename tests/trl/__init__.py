"""Tests of the TRL integration."""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns of what it calls experimental
