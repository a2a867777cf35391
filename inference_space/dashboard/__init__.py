"""The live dashboard of a run; `python -m inference_space.dashboard` serves it without a replica."""
