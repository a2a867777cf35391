"""The vLLM Space: a stock vLLM behind a gateway, kept at the run's newest version by a follower."""
