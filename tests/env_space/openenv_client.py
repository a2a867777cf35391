"""What OpenEnv's own client and validator say about a running service; needs an installed `openenv`.

    python -m tests.env_space.openenv_client URL FOLDER WORD...

prints one JSON object. FOLDER is env_space's, WORDs are the possible secrets. The game is played as TRL's
published Wordle example plays it: `reset()` without seed, the new part of the first message's text as
feedback, the last reward as the reward of the game.
"""

import asyncio
import json
import sys

from openenv.cli.__main__ import app as openenv_command
from openenv.core.generic_client import GenericEnvClient
from typer.testing import CliRunner

from env_space.game import feedback
from tests.env_space.players import OpenEnvPlayer, play_together


class WordleEnv:
    """TRL's environment class around the client."""

    def __init__(self, url):
        self.client = GenericEnvClient(base_url=url).sync()

    def reset(self, **kwargs):
        result = self.client.reset()
        self._text = result.observation["messages"][0]["content"]
        self.reward = 0.0
        self.done = False
        return self._text

    def guess(self, guess):
        if self.done:
            raise ValueError("Game over.")
        result = self.client.step({"message": guess})
        text = result.observation["messages"][0]["content"]
        feedback = text[len(self._text) :]
        self._text = text
        self.reward = 0.0 if "You attempted an invalid move" in feedback else result.reward
        self.done = result.done
        return feedback


def marks_in(feedback):
    """The last line of G, Y and X below "Feedback:", as the example's reward functions look for it."""
    lines = feedback.split("Feedback:", 1)[-1].replace(" ", "").split("\n")
    return next((line for line in reversed(lines) if line and set(line) <= set("GYX")), "")


def solve(env, words):
    """Play by elimination; returns the guesses with the feedback to each."""
    left = list(words)
    turns = []
    while not env.done:
        guess = left[0]
        answer = env.guess(f"[{guess}]")
        turns.append([guess, answer])
        marks = marks_in(answer).translate(str.maketrans("GYX", "+?-"))
        left = [word for word in left[1:] if feedback(guess, word) == marks]
    return turns


def trl_game(url, words):
    env = WordleEnv(url)
    prompt = env.reset()
    invalid = [env.guess("[zzzzz]"), env.reward]
    turns = solve(env, words)
    result = {"prompt": prompt, "invalid": invalid, "turns": turns, "reward": env.reward, "done": env.done}
    result["state"] = env.client.state()
    env.reset()
    again = {"reward": env.reward, "done": env.done}
    env.client.close()
    return {**result, "again": again}


def command(*arguments):
    """The exit code and the output of an `openenv` command; here, as importing OpenEnv takes seconds."""
    result = CliRunner().invoke(openenv_command, [str(argument) for argument in arguments])
    return [result.exit_code, result.output]


def main():
    url, folder, *words = sys.argv[1:]
    seen = {
        "trl": trl_game(url, words),
        "validate_url": command("validate", "--url", url),
        "validate_folder": command("validate", folder, "--level", "static"),
        "errors": asyncio.run(play_together(OpenEnvPlayer, url, games=64)),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
