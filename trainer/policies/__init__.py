"""Small policies that need no model hub: a checkpoint for Wordle, and SmolLM2 from an installed package."""
