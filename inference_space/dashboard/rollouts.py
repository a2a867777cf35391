"""Rollouts as they are shown: a game's answer to a guess as tiles, any other as text."""

from __future__ import annotations

import re

_GUESS = re.compile(r"(?:([a-z])\d([+?-]))+")
_LETTER = re.compile(r"([a-z])\d([+?-])")
_MARK = {"+": ("hit", "in place"), "?": ("near", "elsewhere"), "-": ("miss", "not in the word")}


def tiles(answered: str) -> list[tuple[str, str, str]]:
    """Letter, colour and place of each tile; none if this is no answer to a guess."""
    guess = _GUESS.match(answered)
    return [(letter, *_MARK[mark]) for letter, mark in _LETTER.findall(guess[0])] if guess else []
