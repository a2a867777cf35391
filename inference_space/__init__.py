"""The vLLM Space: a stock vLLM behind a public face, kept at the run's newest version by a follower."""
