"""The newest group of rollouts, side by side: games as boards, other answers as text.

Everything here was written by a model or an environment, so all of it is escaped.
"""

from __future__ import annotations

import re
from html import escape

from delta_weight_sync.runlog import Rollout
from inference_space.dashboard.tables import card
from inference_space.dashboard.view import Progress
from inference_space.dashboard.words import plural

_GUESS = re.compile(r"(?:([a-z])\d([+?-]))+")
_LETTER = re.compile(r"([a-z])\d([+?-])")
_MARK = {"+": ("hit", "in place"), "?": ("near", "elsewhere"), "-": ("miss", "not in the word")}


def boards(run: Progress) -> str:
    """The card of the newest recorded group; nothing where a run records none."""
    if run.group is None:
        return ""
    step = run.group
    prompt = f"<details><summary>Prompt</summary><pre>{escape(step.prompt)}</pre></details>"
    games = "".join(_game(rollout) for rollout in step.rollouts)
    about = f"step {step.step}: one prompt, {plural(len(step.rollouts), 'answer')}, each with its reward"
    return card("Latest group", about, f'{prompt}<ul class="boards">{games}</ul>')


def _game(rollout: Rollout) -> str:
    rows = "".join(_turn(said, answered) for said, answered in rollout.turns if said.strip() or answered)
    reward = "no reward" if rollout.reward is None else f"{rollout.reward:.2f}"
    return (
        f'<li><div class="board">{rows}</div><p><strong>{reward}</strong>'
        f' <span class="mute">weights of sync {rollout.sync}</span></p></li>'
    )


def _turn(said: str, answered: str) -> str:
    guess = _GUESS.match(answered)
    if guess is None:
        return f'<div class="said">{escape(said)}<span class="mute">{escape(answered)}</span></div>'
    letters = _LETTER.findall(guess[0])
    words = ", ".join(f"{letter} {_MARK[mark][1]}" for letter, mark in letters)
    tiles = "".join(f'<i class="{_MARK[mark][0]}">{letter}</i>' for letter, mark in letters)
    return f'<div class="tiles" role="img" aria-label="{words}">{tiles}</div>'
