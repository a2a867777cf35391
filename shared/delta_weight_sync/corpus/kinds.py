"""What part of a transformer a checkpoint's tensor is, by its name."""

from __future__ import annotations

import re
from typing import Final

_PARTS: Final = {  # the first that fits; a norm beside the attention is a norm
    "norm": r"norm|\bln_|layernorm",
    "head": r"\blm_head\b|\bembed_out\b|^output\.",
    "embedding": r"embed|\bwte\b|\bwpe\b",
    "attention": r"attn|attention|\b[qkvo]_proj\b|\bqkv",
    "mlp": r"mlp|feed_forward|ffn|experts|\bfc\d?\b|\b(gate|up|down)_proj\b",
}
KINDS: Final = ("embedding", "attention", "mlp", "norm", "head", "other")


def kind_of(name: str) -> str:
    """One of `KINDS`."""
    return next((kind for kind, pattern in _PARTS.items() if re.search(pattern, name)), "other")
