"""Wordle as token ids: exactly what TRL's rollout loop renders for one tool, `guess(word: str)`."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.policies.tokens import END_OF_TURN, PAD, build_tokenizer

LETTERS = 5
PROMPT = "Play Wordle."
USER, ASSISTANT = "<|im_start|>user\n", "\n<|im_start|>assistant\n"
CALL, END_CALL = '<tool_call>\n{"name": "guess", "arguments": {"word": "', '"}}\n</tool_call>'
RESPONSE, END_RESPONSE = "\n<|im_start|>user\n<tool_response>\n", f"\n</tool_response>{END_OF_TURN}"
GAME_OVER, NOT_A_WORD = " game over", "not a word"
PHRASES = [USER, ASSISTANT, CALL, END_CALL, RESPONSE, END_RESPONSE, PROMPT, GAME_OVER, NOT_A_WORD]
MARKS = [f"{letter}{place}{mark}" for place in range(1, 6) for mark in "-?+" for letter in ascii_lowercase]

# A turn is CALL, five letters, END_CALL. END_CALL stops generation as END_OF_TURN does, so nothing can follow
# a call; with this many tokens as the limit of a completion, nothing can precede a whole word either.
TURN_TOKENS = LETTERS + 2


def build_wordle_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in which each letter, mark and piece of tool boilerplate is one token; marks come last."""
    return build_tokenizer([*PHRASES, *MARKS])


class WordleTokens:
    """The ids of a Wordle tokenizer, and the pieces of a game built from them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        ids = tokenizer.get_vocab()
        self.pad, self.end_of_turn = ids[PAD], ids[END_OF_TURN]
        self.stops = [self.end_of_turn, ids[END_CALL]]
        self.letters = [ids[letter] for letter in ascii_lowercase]
        self.marks, self.not_a_word = [ids[mark] for mark in MARKS], ids[NOT_A_WORD]
        self.prompt = self._of(USER + PROMPT + END_OF_TURN + ASSISTANT)
        self._call, self._end_call = ids[CALL], ids[END_CALL]

    def call(self, word: str) -> list[int]:
        """What the policy samples in one turn."""
        return self._of(CALL + word + END_CALL)

    def response(self, observation: str) -> list[int]:
        """What stands between two turns: what the game said of the first."""
        return self._of(END_OF_TURN + RESPONSE + observation + END_RESPONSE + ASSISTANT)

    def called_word(self, turn: Sequence[int]) -> str | None:
        """The word that `turn` guesses, whatever it is; None if it is not one call and nothing else."""
        if len(turn) < 2 or (turn[0], turn[-1]) != (self._call, self._end_call):
            return None
        return str(self._tokenizer.decode(turn[1:-1]))

    def _of(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])
