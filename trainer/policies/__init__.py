"""Small policies that need no model hub: Wordle's and SmolLM2's, what built them, and what measures them."""
