"""Checks, without a network, whether a sync is exact on this machine's GPU, and how fast it is."""
