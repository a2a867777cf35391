"""A game as the public OpenEnv Wordle environment tells it, so that clients written for that one understand.

They find the guess between square brackets, and the marks as the letters G, Y and X on a line of their own
below "Feedback:"; "You attempted an invalid move" tells them that a guess earned nothing.
"""

import re

from env_space.wordle import MAX_GUESSES, Move

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_EXAMPLES = {4: "lane", 5: "crane", 6: "planet", 7: "strange"}
_LETTERS = str.maketrans("+?-", "GYX")


def prompt(length: int, hard_mode: bool) -> str:
    """The rules, as the first thing a policy reads."""
    hints = "A guess must use every hint that you were given.\n" if hard_mode else ""
    return (
        f"You are playing Wordle. The secret is an English word of {length} letters; "
        f"you have {MAX_GUESSES} guesses.\n"
        f"Write each guess between square brackets, like [{_EXAMPLES[length]}].\n"
        "Every letter is then marked: G if it is in the right place, Y if it is in the word but elsewhere, "
        "X if it is not in the word.\n"
        f"{hints}A guess that is not a word costs a turn."
    )


def guessed_word(message: str) -> str:
    """The word that `message` guesses: what stands between its last brackets, or else all of it."""
    found = _BRACKETS.findall(message)
    return str(found[-1] if found else message).strip()


def story(message: str, move: Move) -> str:
    """What one move adds to the text of the game."""
    told = f"\n[Player 0] {message[:200]}\n[GAME] "
    if move.valid:
        told += f"Feedback:\n{' '.join(move.word.upper())}\n{' '.join(move.feedback.translate(_LETTERS))}\n"
    else:
        told += "You attempted an invalid move. "
    if move.message:
        told += f"{move.message} "
    return told + _standing(move)


def _standing(move: Move) -> str:
    if move.solved:
        return "You found the word."
    if move.done:
        return f"The game is over; the word was {move.secret}."
    left = MAX_GUESSES - move.turn
    return f"You have {left} {'guess' if left == 1 else 'guesses'} left."
