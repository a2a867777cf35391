"""A byte-level tokenizer plus whole phrases as single tokens, with a chat template for tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_template

PAD = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

# Qwen3's layout, except that the line break opens a turn instead of closing the one before it: a finished
# turn then keeps its tokens whatever follows, which TRL needs to train on whole conversations.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if not loop.first -%}{{ '\\n' }}{%- endif -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in (message.tool_calls or []) -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\\n<|im_start|>assistant\\n' }}{%- endif -%}"""


def build_tokenizer(phrases: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token each for `PAD`, `END_OF_TURN`, the 256 bytes and every one of `phrases`, in that order."""
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
    tokenizer.response_template = qwen3_template  # how TRL reads the tool calls back out of a completion
    return tokenizer
