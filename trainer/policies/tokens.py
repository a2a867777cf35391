"""Tokenizers of the small policies: bytes, and phrases as single tokens, with the chat template of SmolLM2.

A Wordle game is exactly what the rollout loop renders for one tool, `guess(word: str)`.
"""

from collections.abc import Sequence
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_template

from trainer.policies.smollm2 import CHAT_TEMPLATE

PAD = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

LETTERS = 5
PROMPT = "Play Wordle."
USER = "<|im_start|>user\n"
ASSISTANT = "\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "guess", "arguments": {"word": "'
END_CALL = '"}}\n</tool_call>'
RESPONSE = "\n<|im_start|>user\n<tool_response>\n"
END_RESPONSE = f"\n</tool_response>{END_OF_TURN}"
GAME_OVER = " game over"
NOT_A_WORD = "not a word"
PHRASES = [USER, ASSISTANT, CALL, END_CALL, RESPONSE, END_RESPONSE, PROMPT, GAME_OVER, NOT_A_WORD]
MARKS = [f"{letter}{place}{mark}" for place in range(1, 6) for mark in "-?+" for letter in ascii_lowercase]

# A turn is CALL, five letters, END_CALL. END_CALL stops generation as END_OF_TURN does, so nothing can follow
# a call. With this many tokens as the limit of a completion, nothing can precede a whole word either.
TURN_TOKENS = LETTERS + 2


def build_tokenizer(phrases: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for `PAD`, `END_OF_TURN`, each byte and each phrase, in that order."""
    symbols = [PAD, END_OF_TURN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (PAD, END_OF_TURN)])
    core.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END_OF_TURN, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template  # how TRL parses tool calls
    return tokenizer


def build_wordle_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer in which each letter, mark and piece of tool boilerplate is one token."""
    return build_tokenizer([*PHRASES, *MARKS])


class WordleTokens:
    """Token ids of a Wordle tokenizer, and the pieces of a game built from them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        ids = tokenizer.get_vocab()
        self.pad = ids[PAD]
        self.end_of_turn = ids[END_OF_TURN]
        self.stops = [self.end_of_turn, ids[END_CALL]]
        self.letters = [ids[letter] for letter in ascii_lowercase]
        self.marks = [ids[mark] for mark in MARKS]
        self.not_a_word = ids[NOT_A_WORD]
        self.prompt = self._of(USER + PROMPT + END_OF_TURN + ASSISTANT)
        self._call = ids[CALL]
        self._end_call = ids[END_CALL]

    def call(self, word: str) -> list[int]:
        """The tokens that the policy samples in one turn."""
        return self._of(CALL + word + END_CALL)

    def response(self, observation: str) -> list[int]:
        """The tokens between two turns: the game's answer to the first."""
        return self._of(END_OF_TURN + RESPONSE + observation + END_RESPONSE + ASSISTANT)

    def called_word(self, turn: Sequence[int]) -> str | None:
        """The word that a turn guesses, valid or not; None unless the turn is exactly one call."""
        if len(turn) < 2 or (turn[0], turn[-1]) != (self._call, self._end_call):
            return None
        return str(self._tokenizer.decode(turn[1:-1]))

    def _of(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])
