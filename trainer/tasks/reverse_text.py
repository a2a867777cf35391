"""Reverse-text: the policy writes a text backwards, letter by letter. More similar answers earn more.

Prompt, tags and reward are those of prime-rl's example, so its checkpoints can be trained here. A text has
words from the tokenizer's vocabulary. A word and the space before it are one token; the first word of a text
has no space. So the policy sees no letters, and has to know how each token is spelled.
"""

import random
import re
from difflib import SequenceMatcher
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.settings import Settings
from trainer.tasks import Task

PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."

_WORDS_PER_TEXT = 3
_VOCABULARY = 2000  # only the first, most frequent words of the vocabulary are used
_HELD_OUT_SHARE = 10  # one word in ten never appears in training
_MIN_WORDS = 30  # an English tokenizer has thousands
_WORD = re.compile("\u0120([a-z]{3,8})")  # byte-level BPE writes a space as this character
_ANSWER = re.compile("<reversed_text>(.*?)</reversed_text>", re.DOTALL)


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Find frequent words that are one token. Raises `ValueError` if the tokenizer has too few."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda token: token[1])
    words = [match[1] for token, _ in tokens if (match := _WORD.fullmatch(token))][:_VOCABULARY]
    if len(words) < _MIN_WORDS:
        raise ValueError(f"the tokenizer has only {len(words)} English words: use an English model")
    return words


def similarity(answer: str, text: str) -> float:
    """Similarity, 0 to 1, of the answer's first tagged text to the reversed text. Without tags it is 0."""
    found = _ANSWER.search(answer)
    return SequenceMatcher(None, found[1].strip(), text[::-1]).ratio() if found else 0.0


def reward_reversed(completions: list[list[dict[str, str]]], text: list[str], **_: Any) -> list[float]:
    return [similarity(said[-1]["content"], asked) for said, asked in zip(completions, text, strict=True)]


def texts(tokenizer: PreTrainedTokenizerBase, rows: int, seed: int, *, held_out: bool = False) -> list[str]:
    """Draw `rows` texts, the same ones for the same seed. `held_out` texts share no word with other texts."""
    words = words_of(tokenizer)
    rng = random.Random(seed)
    chosen = [word for i, word in enumerate(words) if (i % _HELD_OUT_SHARE == 0) == held_out]
    return [" ".join(rng.choices(chosen, k=_WORDS_PER_TEXT)) for _ in range(rows)]


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": PROMPT}, {"role": "user", "content": text}]


def make_dataset(tokenizer: PreTrainedTokenizerBase, rows: int, seed: int) -> Dataset:
    asked = texts(tokenizer, rows, seed)
    return Dataset.from_dict({"prompt": [chat(text) for text in asked], "text": asked})


def make_task(settings: Settings, prompts: int, seed: int) -> Task:
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        return Task(make_dataset(tokenizer, prompts, seed), [reward_reversed])
    except ValueError as error:
        raise SystemExit(f"--task reverse_text: {error}") from None
