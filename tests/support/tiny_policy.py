"""A random Qwen3 of a few hundred kilobytes, for tests: `python -m tests.support.tiny_policy FOLDER`."""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import qwen3_chat_template

PAD = "<|endoftext|>"
END = "<|im_end|>"


def build(folder: str | Path, tie: bool = True, seed: int = 0) -> None:
    """Write a bf16 checkpoint with a byte-level tokenizer and Qwen3's chat template.

    `tie` shares embedding and head. The same arguments give the same bits.
    """
    vocabulary = [PAD, END, "<|im_start|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(vocabulary[:3])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = qwen3_chat_template
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=tie,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    build(*sys.argv[1:])
