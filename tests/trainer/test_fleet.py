"""Rollouts over replicas that come and go: the rollout loop plays games against several of them."""

import asyncio
import contextlib
import itertools
import json
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import AutoTokenizer

from tests.support.http_server import Request, answering
from tests.support.waiting import PATIENCE_S, soon
from tests.trainer.test_rollouts import TOKENIZER, Game, named, play, rollout_loop
from trainer.policies.tokens import WordleTokens
from trainer.rollouts import Router
from trainer.spaces import Fleet, SpacesUnavailableError

AT_A_TIME = 8
GAMES = 40


class CountedGame(Game):
    guesses: ClassVar = Counter[int]()  # by game
    games: ClassVar = itertools.count()

    def reset(self, **row: object) -> None:
        self.number = next(self.games)

    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: A five-letter word.
        """
        self.guesses[self.number] += 1
        return super().guess(word)


class Player:
    """A replica that answers the first turn of a game with a guess and the second with its end.

    While its gate is closed, requests wait. Once it is dead, it hangs up.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.dead = False
        self.url = ""
        self.gate.set()
        self.waiting = Counter[str]()
        self.turns = Counter[str]()
        self.least = set[str]()
        self._lock, tokens = threading.Lock(), WordleTokens(AutoTokenizer.from_pretrained(TOKENIZER))
        self._tokens = {"first": tokens.call("crane"), "second": [tokens.end_of_turn]}

    def answer(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        turn = "second" if "game over" in self.text(request) else "first"
        with self._lock:
            self.waiting[turn] += 1
        self.gate.wait(PATIENCE_S)
        with self._lock:
            self.waiting[turn] -= 1
            if self.dead:
                raise ConnectionResetError
            self.turns[turn] += 1
            self.least.add(request.headers["x-policy-min-sync"])
        ids = self._tokens[turn]
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}}
        headers = {"content-type": "application/json", **named(99)}
        return 200, headers, json.dumps({"choices": [choice]}).encode()

    @staticmethod
    def text(request: Request) -> str:
        return str(AutoTokenizer.from_pretrained(TOKENIZER).decode(json.loads(request.body)["prompt"]))


@pytest.fixture
def players() -> Iterator[list[Player]]:
    with contextlib.ExitStack() as stack:
        found = [Player() for _ in range(6)]
        for player in found:
            player.url = stack.enter_context(answering(player.answer))
        yield found
        for player in found:
            player.gate.set()


def listed(file: Path, replicas: list[Any]) -> None:
    """Write the URLs of these replicas to the file, in one step."""
    new = file.with_suffix(".new")
    new.write_text("".join(f"{replica.url}\n" for replica in replicas))
    new.replace(file)


@pytest.mark.full
def test_no_game_is_lost_or_doubled_while_two_replicas_die_and_two_come(players, tmp_path, capfd):
    """Each replica has its share of the games; a game stays at one replica as long as that replica lives."""
    file = tmp_path / "replicas"
    samples = queue.Queue()
    listed(file, players[:4])
    loop = rollout_loop(str(file), 1, samples, game=CountedGame, at_a_time=AT_A_TIME)

    def come_and_go() -> None:
        soon(lambda: samples.qsize() > 10)
        for player in players:
            player.gate.clear()
        soon(lambda: [player.waiting.total() for player in players] == [2, 2, 2, 2, 0, 0])
        for player in players:
            begun = player.turns["first"] - player.turns["second"]
            assert begun == player.waiting["second"], "each game has stayed where it began"
        for player in players[:2]:
            player.dead = True
            player.gate.set()
        soon(lambda: [player.waiting.total() for player in players[2:4]] == [4, 4])
        listed(file, players[2:])
        for player in players[2:4]:
            player.gate.set()
        soon(lambda: all(player.waiting.total() for player in players[4:]))
        for player in players[4:]:
            player.gate.set()

    with ThreadPoolExecutor(1) as pool:
        changes = pool.submit(come_and_go)
        asyncio.run(play(loop, lambda: changes.done() and samples.qsize() >= GAMES))
        changes.result()
    played = [samples.get_nowait() for _ in range(samples.qsize())]
    assert len({sample.group_id for sample in played}) == len(played), "none is there twice"
    assert set(CountedGame.guesses.values()) == {1}, "no move was made twice"
    assert len(CountedGame.guesses) - AT_A_TIME <= len(played) <= len(CountedGame.guesses)
    assert set().union(*(player.least for player in players)) == {"40"}, "sync 100, and 60 may be missing"
    assert all(player.turns["first"] for player in players)


def test_a_replica_that_fails_rests_and_is_asked_again_if_there_is_no_other(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("trainer.rollouts.time.monotonic", lambda: clock[0])
    router = Router(Fleet(["http://a"]))
    url, wait_s = router.choose("")
    assert wait_s == 0
    for _ in range(3):
        assert router.choose(url, failed=True) == ("http://a", 2)
        clock[0] += 2
    assert router.choose(url) == ("http://a", 0)


def test_a_file_of_replicas_that_is_missing_or_empty_is_an_error_only_at_the_start(tmp_path):
    file = tmp_path / "replicas"
    for reason in ("No such file", "it lists no URL"):
        sentence = rf"names no replica \(.*{reason}.*or a file that lists them"
        with pytest.raises(SpacesUnavailableError, match=sentence):
            Fleet([str(file)]).urls()
        file.write_text("\n")
    file.write_text("http://a\nhttp://b\n")
    fleet = Fleet([str(file), "http://c"])
    assert fleet.urls() == ["http://a", "http://b", "http://c"]
    fleet = Fleet([str(file)])
    assert fleet.urls() == ["http://a", "http://b"]
    file.write_text("")
    assert fleet.urls() == ["http://a", "http://b"]
    file.write_bytes(b"\xff")
    assert fleet.urls() == ["http://a", "http://b"]
    file.unlink()
    assert fleet.urls() == ["http://a", "http://b"]
