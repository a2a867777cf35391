"""What a version of a run can do that training never showed it: played in plain torch, from the bucket.

    python -m trainer.held_out --run file:///tmp/bucket#demo --version 0 --env_url http://127.0.0.1:8000 \\
        --out before.json

With `--env_url` it plays Wordle on the environment's held-out words, else it asks the questions of the task
`shorter` that training leaves out. The same games each time: two versions can be compared game by game.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from delta_weight_sync.history import open_run
from trainer import shorter
from trainer.policies.wordle_tokens import WordleTokens
from trainer.wordle_games import play_at

GAMES = 600
ANSWERS = 8  # to each question


def wordle(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, env_url: str) -> list[bool]:
    """Whether each game was solved."""
    generator = torch.Generator().manual_seed(0)
    played = play_at(env_url, model, WordleTokens(tokenizer), range(GAMES), "held_out", generator)
    return [game.solved for game, _ in played]


def brief(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Whether each answer ended by itself within `shorter.BRIEF` tokens."""
    torch.manual_seed(0)
    prompts = shorter.make_dataset(shorter.HELD_OUT)["prompt"]
    chats = [prompt for prompt in prompts for _ in range(ANSWERS)]
    tokenizer.padding_side = "left"
    asked = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**asked, max_new_tokens=shorter.BRIEF, do_sample=True, top_k=0, top_p=1.0)
    ended = said[:, asked["input_ids"].shape[1] :] == tokenizer.eos_token_id
    return [bool(row.any()) for row in ended]


def main() -> None:
    """Command line; writes a JSON list with whether each game was solved."""
    parser = argparse.ArgumentParser(description="Play a version of a run on what training never showed it.")
    parser.add_argument("--run", required=True, help="<bucket>#<run>")
    parser.add_argument("--version", required=True, type=int)
    parser.add_argument("--env_url", default="", help="URL of the Wordle Space; without it: brief answers")
    parser.add_argument("--out", required=True, type=Path, help="file to write")
    options = parser.parse_args()
    reader = open_run(options.run)
    with tempfile.TemporaryDirectory() as folder:
        reader.checkout(reader.at(options.version), Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    solved = wordle(model, tokenizer, options.env_url) if options.env_url else brief(model, tokenizer)
    options.out.write_text(json.dumps(solved))


if __name__ == "__main__":
    main()
