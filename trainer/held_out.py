"""What a version of a run can do that training never showed it: played in plain torch, from the bucket.

    python -m trainer.held_out --run file:///tmp/bucket#demo --version 0 --env_url http://127.0.0.1:8000 \\
        --out before.json

With `--env_url` it plays Wordle on the environment's held-out words, else it reverses texts of words that are
in no text of training. The same tasks each time: two versions can be compared one by one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from delta_weight_sync.history import open_run
from trainer import reverse_text
from trainer.policies.wordle_tokens import WordleTokens
from trainer.wordle_games import play_at

GAMES = 600
TEXTS = 200
ANSWER_TOKENS = 48  # a right answer has about 20


def wordle(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, env_url: str) -> list[bool]:
    """Whether each game was solved."""
    generator = torch.Generator().manual_seed(0)
    played = play_at(env_url, model, WordleTokens(tokenizer), range(GAMES), "held_out", generator)
    return [game.solved for game, _ in played]


def reversals(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[float]:
    """How like what is right each answer is, 0 to 1."""
    torch.manual_seed(0)
    asked = reverse_text.texts(tokenizer, TEXTS, seed=0, held_out=True)
    tokenizer.padding_side = "left"
    chats = tokenizer.apply_chat_template(
        [reverse_text.chat(text) for text in asked],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    said = model.generate(**chats, max_new_tokens=ANSWER_TOKENS, do_sample=True, top_k=0, top_p=1.0)
    answers = tokenizer.batch_decode(said[:, chats["input_ids"].shape[1] :], skip_special_tokens=True)
    return [reverse_text.likeness(answer, text) for answer, text in zip(answers, asked, strict=True)]


def main() -> None:
    """Command line; writes a JSON list with how well each task was solved, 0 to 1."""
    parser = argparse.ArgumentParser(description="Play a version of a run on what training never showed it.")
    parser.add_argument("--run", required=True, help="<bucket>#<run>")
    parser.add_argument("--version", required=True, type=int)
    parser.add_argument("--env_url", default="", help="URL of the Wordle Space; without it: reverse-text")
    parser.add_argument("--out", required=True, type=Path, help="file to write")
    options = parser.parse_args()
    reader = open_run(options.run)
    with tempfile.TemporaryDirectory() as folder:
        reader.checkout(reader.at(options.version), Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    solved = wordle(model, tokenizer, options.env_url) if options.env_url else reversals(model, tokenizer)
    options.out.write_text(json.dumps(solved))


if __name__ == "__main__":
    main()
