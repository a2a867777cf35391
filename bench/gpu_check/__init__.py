"""Checks offline whether the kernels are right on this machine's GPU, and how fast they are."""
