"""The store of sessions: capacity, expiry and retries, with a clock that the test turns."""

from uuid import uuid4

import pytest

from env_space.game import Game, GameError, guesses
from env_space.sessions import Origin, Sessions

TTL_S = 10.0


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sessions(clock):
    return Sessions(2, TTL_S, clock=clock)


def start(sessions, id=None, seed=1, split="train"):
    return sessions.open(id or uuid4(), Origin(seed, split), Game("bride", guesses())).id


def test_a_game_expires_after_the_ttl_without_a_move(sessions, clock):
    id = start(sessions)
    clock.now += TTL_S
    with pytest.raises(GameError, match=r"expired after 10 s without a move; POST /sessions"):
        sessions.play(id, 1, "crane")
    assert len(sessions) == 0


def test_only_the_unused_game_expires(sessions, clock):
    used, unused = start(sessions), start(sessions)
    clock.now += TTL_S / 2
    sessions.play(used, 1, "crane")
    clock.now += TTL_S / 2
    sessions.reap()
    assert len(sessions) == 1
    assert sessions.play(used, 2, "bride").solved
    assert sessions.close(unused).gave_up


def test_a_game_that_ended_is_forgotten_in_the_end(sessions, clock):
    id = start(sessions)
    sessions.close(id)
    clock.now += TTL_S
    with pytest.raises(GameError, match="is unknown"):
        sessions.close(id)


def test_capacity_counts_games_in_play_only(sessions):
    first, _ = start(sessions), start(sessions)
    with pytest.raises(GameError, match="2 games are in play"):
        start(sessions)
    sessions.play(first, 1, "bride")
    start(sessions)
    assert len(sessions) == 2


def test_no_more_games_that_ended_are_kept_than_may_be_in_play(sessions):
    oldest, *later = ids = [uuid4() for _ in range(3)]
    for id in ids:
        sessions.close(start(sessions, id))
    with pytest.raises(GameError):
        sessions.close(oldest)
    assert all(sessions.close(id).gave_up for id in later)


def test_an_id_belongs_to_its_seed_and_to_one_game(sessions):
    id = start(sessions, seed=1)
    with pytest.raises(GameError, match="with seed 1 of split train, not 2 of train; choose a new id"):
        start(sessions, id, seed=2)
    with pytest.raises(GameError, match="not 1 of held_out"):
        start(sessions, id, split="held_out")
    sessions.close(id)
    with pytest.raises(GameError, match="has ended; choose a new id"):
        start(sessions, id, seed=1)


def test_a_move_sent_twice_is_played_once(sessions):
    id = start(sessions)
    first = sessions.play(id, 1, "crane")
    assert sessions.play(id, 1, "CRANE") is first
    assert sessions.play(id, 2, "zonal").turn == 2
    assert sessions.play(id, 1, "crane") is first


def test_the_last_move_can_be_retried_after_the_end(sessions):
    id = start(sessions)
    last = sessions.play(id, 1, "bride")
    assert sessions.play(id, 1, "bride") is last
    with pytest.raises(GameError):
        sessions.play(id, 2, "crane")


def test_every_game_is_reported_once_as_it_ends(clock):
    ended = []
    sessions = Sessions(9, TTL_S, ended.append, clock)
    solved, closed, expired = start(sessions), start(sessions), start(sessions)
    sessions.play(solved, 1, "bride")
    sessions.close(solved)
    sessions.close(closed)
    sessions.close(closed)
    clock.now += TTL_S
    sessions.reap()
    sessions.reap()
    assert [session.id for session in ended] == [solved, closed, expired]
    assert [session.expired for session in ended] == [False, False, True]
    assert ended[2].used_at - ended[2].opened_at == TTL_S
