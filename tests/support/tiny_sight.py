"""A random LLaVA of a few hundred kilobytes, for tests: it takes images, and needs no torchvision."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from delta_weight_sync.checkpoint import WEIGHTS

SIDE = 16  # pixels of an image
_IMAGE = "<image>"


def build(folder: Path) -> None:
    """Write a bf16 checkpoint with a byte-level tokenizer and a processor for images."""
    vocabulary = ["<pad>", "<end>", _IMAGE, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(vocabulary[:3])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<end>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": _IMAGE},
    )
    heads = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config = LlavaConfig(
        text_config={
            **heads,
            "model_type": "llama",
            "vocab_size": len(vocabulary),
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
        },
        vision_config={
            **heads,
            "model_type": "clip_vision_model",
            "num_attention_heads": 4,
            "patch_size": 4,
            "image_size": SIDE,
        },
        image_token_index=vocabulary.index(_IMAGE),
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)  # so that an answer depends on the image
    model.bfloat16().save_pretrained(folder)
    # vLLM knows only the names of the Hub's checkpoints, which transformers 5.19 reads, but does not write.
    state = load_file(weights := folder / WEIGHTS)
    tower = "vision_tower."
    old = {name: name.replace(tower, f"{tower}vision_model.") for name in state if "vision_model" not in name}
    save_file({old.get(name, name): state[name] for name in state}, weights, metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    processor = {"processor_class": "LlavaProcessor", "patch_size": 4, "image_token": _IMAGE}
    processor |= {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    images = {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"}
    images |= {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
