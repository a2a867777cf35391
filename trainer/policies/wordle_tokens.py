"""Wordle as token ids: exactly what TRL's rollout loop renders for one tool, `guess(word: str)`."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.policies.tokens import END_OF_TURN, PAD, build_tokenizer

PROMPT = "Play Wordle."
USER, ASSISTANT = "<|im_start|>user\n", "\n<|im_start|>assistant\n"
CALL, END_CALL = '<tool_call>\n{"name": "guess", "arguments": {"word": "', '"}}\n</tool_call>'
RESPONSE, END_RESPONSE = "\n<|im_start|>user\n<tool_response>\n", "\n</tool_response>"
GAME_OVER, NOT_A_WORD = " game over", "not a word"
PHRASES = [USER, ASSISTANT, CALL, END_CALL, RESPONSE, END_RESPONSE, PROMPT, GAME_OVER, NOT_A_WORD]
MARKS = [f"{letter}{place}{mark}" for place in range(1, 6) for mark in "-?+" for letter in ascii_lowercase]

# A turn is CALL, word, END_CALL. END_CALL stops generation as END_OF_TURN does, so nothing can follow a
# call; with this many tokens as the limit of a completion, nothing can precede one either.
TURN_TOKENS = 3


def build_wordle_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer in which each word, mark and piece of tool boilerplate is one token; words come last."""
    return build_tokenizer([*PHRASES, *MARKS, *words])


class WordleTokens:
    """The ids of a Wordle tokenizer, and the pieces of a game built from them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the words back out of the vocabulary: they are the tokens after the marks."""
        self._ids = tokenizer.get_vocab()
        self.words: list[str] = sorted(
            (token for token in self._ids if len(token) == 5 and token.isalpha()), key=self._ids.__getitem__
        )
        self._word_of = {self._ids[word]: word for word in self.words}
        self.pad, self.end_of_turn = self._ids[PAD], self._ids[END_OF_TURN]
        self.stops = [self.end_of_turn, self._ids[END_CALL]]
        self.prompt = self._of(USER, PROMPT, END_OF_TURN, ASSISTANT)

    def call(self, word: str) -> list[int]:
        """What the policy samples in one turn."""
        return self._of(CALL, word, END_CALL)

    def response(self, word: str, marks: str | None, over: bool) -> list[int]:
        """What stands between two turns: `marks` for `word`, or None where the game does not know it."""
        if marks is None:
            body = [NOT_A_WORD]
        else:
            body = [f"{letter}{i}{mark}" for i, (letter, mark) in enumerate(zip(word, marks, strict=True), 1)]
        ending = [GAME_OVER] if over else []
        return self._of(END_OF_TURN, RESPONSE, *body, *ending, END_RESPONSE, END_OF_TURN, ASSISTANT)

    def is_call(self, turn: Sequence[int]) -> bool:
        """Whether `turn` is one call and nothing else; the word in it may be anything, or missing."""
        return [turn[0], turn[-1]] == self._of(CALL, END_CALL)

    def called_word(self, turn: Sequence[int]) -> str | None:
        """The word that a call guesses, or None where the game will not know it."""
        return self._word_of.get(turn[1])

    def _of(self, *tokens: str) -> list[int]:
        return [self._ids[token] for token in tokens]
