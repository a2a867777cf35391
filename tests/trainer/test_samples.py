"""Which tokens of a conversation are trained on, if its turns are tokenized again and again."""

import numpy as np
import pytest

from trainer.samples import UNKNOWN, Conversation, MadeBy


def made(sync: int) -> list[MadeBy]:
    return [{"weights": {"version": sync, "term": 1, "sync": sync}, "tokens": [(0, 0, 100)]}]


@pytest.mark.parametrize(
    ("prompt", "tokens", "syncs"),
    [
        ([1, 2, 3, 4, 5, 9], [[1, 2, 3, 4, 5, 9, 6]], [[UNKNOWN, UNKNOWN, 7, 7, 7, UNKNOWN, 8]]),
        ([1, 2, 3, 4, 0, 9], [[1, 2, 3, 4, 0, 9, 6]], [[UNKNOWN, UNKNOWN, 7, 7, UNKNOWN, UNKNOWN, 8]]),
        ([1, 2, 3, 4], [[1, 2, 3, 4, 6]], [[UNKNOWN, UNKNOWN, 7, 7, 8]]),
        ([1, 2, 3, 0], [[1, 2, 3, 4, 5], [1, 2, 3, 0, 6]], [[UNKNOWN] * 2 + [7] * 3, [UNKNOWN] * 4 + [8]]),
        (
            [0, 2, 3, 4, 5],
            [[1, 2, 3, 4, 5], [0, 2, 3, 4, 5, 6]],
            [[UNKNOWN] * 2 + [7] * 3, [UNKNOWN] * 5 + [8]],
        ),
    ],
    ids=[
        "it goes on",
        "one token is another",
        "one is missing",
        "two are others",
        "the first prompt is another",
    ],
)
def test_only_what_the_policy_wrote_as_it_stands_is_trained_on(prompt, tokens, syncs):
    conversation = Conversation([], forks_at=2)
    conversation.add_turn([1, 2], [3, 4, 5], [-3.0, -4.0, -5.0], made(7), 10)
    conversation.add_turn(prompt, [6], [-6.0], made(8), 10)
    assert [row.tokens for row in conversation.rows] == tokens
    assert [row.syncs for row in conversation.rows] == syncs
    for row in conversation.rows:
        own = np.array(row.syncs) != UNKNOWN
        assert row.mask == own.tolist()
        assert row.log_probs == np.where(own, -1.0 * np.array(row.tokens), 0.0).tolist()
    assert conversation.oldest == 7
