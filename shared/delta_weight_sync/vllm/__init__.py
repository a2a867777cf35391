"""The following half, inside vLLM: from versions in the bucket to live parameters."""
