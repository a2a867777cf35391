"""Publish only the weights that changed, through a bucket; vLLM replicas patch them into their live ones."""

__version__ = "0.2.0"
