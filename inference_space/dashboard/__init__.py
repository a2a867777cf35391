"""The live dashboard of a run; `python -m inference_space.dashboard` serves it without a replica."""

from inference_space.dashboard.routes import mount

__all__ = ["mount"]
