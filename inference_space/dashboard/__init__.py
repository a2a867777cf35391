"""The live dashboard of a run. It reads the bucket and nothing else."""

from inference_space.dashboard.mount import mount

__all__ = ["mount"]
