"""Repeats the imitation that the policies in `trainer/policies` begin with, before RL.

    python -m bench.policies wordle-tiny --out trainer/policies/wordle-tiny
    python -m bench.policies smollm2 --task wordle --out trainer/policies/smollm2-wordle

The recipes are `trainer.policies.wordle_policy` and `trainer.policies.imitation`; the game that the imitated
players play is the environment's.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from bench.results import ROOT
from env_space.game import Game
from trainer.policies import imitation, smollm2, wordle_policy
from trainer.policies.wordle_policy import read_words

WORDS = ROOT / "env_space" / "words" / "answers-5.txt"


def main() -> None:
    """Repeat the imitation that a policy begins with."""
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description=main.__doc__)
    commands = parser.add_subparsers(required=True)
    tiny = commands.add_parser("wordle-tiny", help="build and warm-start the small Wordle policy")
    tiny.add_argument("--words", default=WORDS, type=Path, help="file of answers, one per line")
    tiny.set_defaults(run=_build)
    taught = commands.add_parser("smollm2", help="teach SmolLM2 a task")
    taught.add_argument("--task", choices=smollm2.ADAPTERS, required=True)
    taught.add_argument("--steps", type=int, default=imitation.STEPS)
    taught.set_defaults(run=_teach)
    for command in (tiny, taught):
        command.add_argument("--out", required=True, type=Path, help="folder to write to")
        command.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the same sums, and so the same weights, on any number of cores
    options.run(options)


def _build(options: argparse.Namespace) -> None:
    wordle_policy.build(read_words(options.words), options.out, options.seed, Game)


def _teach(options: argparse.Namespace) -> None:
    tasks = {"reverse_text": imitation.REVERSE_TEXT, "wordle": imitation.wordle(read_words(WORDS), Game)}
    with tempfile.TemporaryDirectory() as scratch:
        base = smollm2.build(Path(scratch) / "smollm2")
        imitation.teach(base, tasks[options.task], options.out, seed=options.seed, steps=options.steps)


if __name__ == "__main__":
    main()
