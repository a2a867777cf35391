"""Reverse-text: a text is to be written backwards, letter by letter; what is nearly right earns nearly all.

The prompt, the tags and the reward are those of prime-rl's example, so its checkpoints can be trained here.
The texts need no download: words, and beginnings of words, of the tokenizer's own vocabulary. Each is one
token to a policy, which has to know how it is spelled.
"""

from __future__ import annotations

import random
import re
from difflib import SequenceMatcher
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."

_LENGTH = 3  # words of a text
_KNOWN = 2000  # words: a vocabulary has the frequent ones first
_HELD_OUT_SHARE = 10  # one word in so many is in no text of training
_LEAST = 30  # an English one has thousands
_WORD = re.compile("\u0120([a-z]{3,8})")  # byte-level BPE writes a space so
_ANSWER = re.compile("<reversed_text>(.*?)</reversed_text>", re.DOTALL)


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The frequent words that are one token each; ValueError if it is no byte-level BPE of English."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda token: token[1])
    known = [found[1] for token, _ in tokens if (found := _WORD.fullmatch(token))][:_KNOWN]
    if len(known) < _LEAST:
        raise ValueError(f"the tokenizer knows {len(known)} English words; take a model of English")
    return known


def likeness(said: str, text: str) -> float:
    """Of what stands in the first pair of tags to the reversed text: 0 to 1, and 0 without tags."""
    found = _ANSWER.search(said)
    return SequenceMatcher(None, found[1].strip(), text[::-1]).ratio() if found else 0.0


def reward_reversed(completions: list[list[dict[str, str]]], text: list[str], **_: Any) -> list[float]:
    """The likeness of each answer to its reversed text."""
    return [likeness(said[-1]["content"], asked) for said, asked in zip(completions, text, strict=True)]


def texts(tokenizer: PreTrainedTokenizerBase, rows: int, seed: int, *, held_out: bool = False) -> list[str]:
    """As many texts, the same ones for the same seed; `held_out` ones share no word with all others."""
    words, rng = words_of(tokenizer), random.Random(seed)
    chosen = [word for i, word in enumerate(words) if (i % _HELD_OUT_SHARE == 0) == held_out]
    return [" ".join(rng.choices(chosen, k=_LENGTH)) for _ in range(rows)]


def chat(text: str) -> list[dict[str, str]]:
    """What the policy is asked."""
    return [{"role": "system", "content": PROMPT}, {"role": "user", "content": text}]


def answer(text: str) -> str:
    """What earns all of the reward."""
    return f"<reversed_text>{text[::-1]}</reversed_text>"


def make_dataset(tokenizer: PreTrainedTokenizerBase, rows: int, seed: int) -> Dataset:
    """As many texts, each with its prompt."""
    asked = texts(tokenizer, rows, seed)
    return Dataset.from_dict({"prompt": [chat(text) for text in asked], "text": asked})
