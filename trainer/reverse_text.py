"""Reverse-text: a text is to be written backwards, letter by letter; what is nearly right earns nearly all.

The prompt, the tags and the reward are those of prime-rl's example, so its checkpoints can be trained here.
The texts need no download: words, and beginnings of words, of the tokenizer's own vocabulary. Each is one
token to a policy, which has to know how it is spelled.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from hashlib import sha256
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
WORDS = 3  # of a text
HELD_OUT_SHARE = 10  # one word of so many is never trained on

_KNOWN = 2000  # words: a vocabulary has the frequent ones first
_WORD = re.compile("\u0120([a-z]{3,8})")  # byte-level BPE writes a space so
_ANSWER = re.compile("<reversed_text>(.*?)</reversed_text>", re.DOTALL)


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The frequent words that are one token each; the last tenth of them is held out.

    ValueError if there are too few for a text: the tokenizer is not a byte-level BPE of English.
    """
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda token: token[1])
    known = [found[1] for token, _ in tokens if (found := _WORD.fullmatch(token))][:_KNOWN]
    if len(known) < HELD_OUT_SHARE * WORDS:
        raise ValueError(f"the tokenizer knows {len(known)} English words; take a model of English")
    return sorted(known, key=lambda word: sha256(word.encode()).digest())


def texts(tokenizer: PreTrainedTokenizerBase, seed: int, *, held_out: bool = False) -> Iterator[str]:
    """Without end; the same ones for the same seed. Held-out texts consist of held-out words."""
    words = words_of(tokenizer)
    border = len(words) - len(words) // HELD_OUT_SHARE
    drawn, rng = words[border:] if held_out else words[:border], random.Random(seed)
    while True:
        yield " ".join(rng.choices(drawn, k=WORDS))


def chat(text: str) -> list[dict[str, str]]:
    """What a policy is asked."""
    return [{"role": "system", "content": PROMPT}, {"role": "user", "content": text}]


def answer(text: str) -> str:
    """What is right."""
    return f"<reversed_text>{text[::-1]}</reversed_text>"


def likeness(said: str, text: str) -> float:
    """Of what stands in the first pair of tags to the reversed text: 0 to 1, and 0 without tags."""
    found = _ANSWER.search(said)
    return SequenceMatcher(None, found[1].strip(), text[::-1]).ratio() if found else 0.0


def reward_reversed(completions: list[list[dict[str, str]]], text: list[str], **_: Any) -> list[float]:
    """The likeness of each answer to its reversed text."""
    return [likeness(said[-1]["content"], asked) for said, asked in zip(completions, text, strict=True)]


def make_dataset(tokenizer: PreTrainedTokenizerBase, rows: int, seed: int) -> Dataset:
    """As many texts for training, each with its prompt."""
    drawn = [text for text, _ in zip(texts(tokenizer, seed), range(rows), strict=False)]
    return Dataset.from_dict({"prompt": list(map(chat, drawn)), "text": drawn})
