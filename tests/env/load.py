"""Many games at once from one client process, against a running service; prints what they met.

    python -m tests.env.load --url http://127.0.0.1:8000 --games 256 --minutes 10 --protocol http --think 0.25

`--protocol ws` plays over `/ws` with OpenEnv's own client, so it needs an environment in which `openenv` is
installed. Every game is whole: opened, guessed to its end, closed; then its player starts the next. Before
each guess it thinks, as a policy does, for `--think` seconds on average; with 0 the server has all it can do.
The guesses are drawn from the answers, so nearly all games take six.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from urllib.request import urlopen


@dataclass
class Tally:
    """What happened so far; `moves` holds the seconds that each took, for every minute of the run."""

    started: float
    games: int = 0
    moves: list[array[float]] = field(default_factory=lambda: [array("d")])
    errors: list[str] = field(default_factory=list)

    def count(self, seconds: float) -> None:
        """Take in a move that just ended."""
        if time.monotonic() - self.started > 60 * len(self.moves):
            self.moves.append(array("d"))
        self.moves[-1].append(seconds)


class Player(ABC):
    """Plays one game after another on one connection."""

    @abstractmethod
    async def start(self, seed: int) -> None:
        """Open a game."""

    @abstractmethod
    async def guess(self, word: str) -> bool:
        """Play a move; returns whether the game is over."""

    @abstractmethod
    async def finish(self) -> None:
        """Close the game."""

    @abstractmethod
    async def leave(self) -> None:
        """Close the connection."""


class HttpPlayer(Player):
    """The trainer's way: sessions over plain HTTP, with aiohttp."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        import aiohttp

        self._http = aiohttp.ClientSession(url, headers=headers, raise_for_status=True)
        self._game, self._turn = "", 0

    async def start(self, seed: int) -> None:
        async with self._http.post("/sessions", json={"seed": seed}) as answer:
            self._game, self._turn = f"/sessions/{(await answer.json())['session']}", 0

    async def guess(self, word: str) -> bool:
        self._turn += 1
        move = {"word": word, "turn": self._turn}
        async with self._http.post(f"{self._game}/guess", json=move) as answer:
            return (await answer.json())["done"]

    async def finish(self) -> None:
        async with self._http.delete(self._game) as answer:
            await answer.read()

    async def leave(self) -> None:
        await self._http.close()


class OpenEnvPlayer(Player):
    """OpenEnv's own client; a WebSocket per player."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=url, connect_timeout_s=60, headers=headers)

    async def start(self, seed: int) -> None:
        await self._client.reset(seed=seed)

    async def guess(self, word: str) -> bool:
        return (await self._client.step({"message": f"[{word}]"})).done

    async def finish(self) -> None:
        """A reset ends the game before it."""

    async def leave(self) -> None:
        await self._client.close()


PLAYERS = {"http": HttpPlayer, "ws": OpenEnvPlayer}


async def play(player: Player, words: list[str], seed: int, until: float, think: float, tally: Tally) -> None:
    """Play games, at least one, until the clock says `until`; every one is finished."""
    rng, over = random.Random(seed), False
    while not over:
        try:
            await player.start(rng.randrange(2**31))
            done = False
            while not done:
                await asyncio.sleep(rng.uniform(0, 2 * think))
                started = time.perf_counter()
                done = await player.guess(rng.choice(words))
                tally.count(time.perf_counter() - started)
            await player.finish()
            tally.games += 1
        except Exception as error:  # noqa: BLE001 - whatever it was, it is what we count
            tally.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)
        over = time.monotonic() >= until


async def run(
    url: str, protocol: str, games: int, seconds: float, think: float = 0, key: str = ""
) -> dict[str, object]:
    """Play `games` games at once for `seconds`; returns the report."""
    words = json.load(urlopen(f"{url}/words"))["answers"]
    before = _server(url)
    players = [PLAYERS[protocol](url, {"X-Space-Key": key} if key else {}) for _ in range(games)]
    tally, used = Tally(time.monotonic()), time.process_time()
    tasks = [
        asyncio.create_task(play(player, words, seed, tally.started + seconds, think, tally))
        for seed, player in enumerate(players)
    ]
    await asyncio.sleep(seconds * 0.8)
    full = await asyncio.to_thread(_server, url)
    await asyncio.gather(*tasks)
    took, used = time.monotonic() - tally.started, time.process_time() - used
    after = _server(url)
    await asyncio.gather(*(player.leave() for player in players))
    return _report(tally, took, used / took, before, full, after)


def _server(url: str) -> dict[str, float]:
    text = urlopen(f"{url}/metrics").read().decode()
    wanted = ("wordle_active_sessions", "process_resident_memory_bytes", "process_cpu_seconds_total")
    return {name: float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1]) for name in wanted}


def _report(
    tally: Tally,
    took: float,
    client_cpu: float,
    before: dict[str, float],
    full: dict[str, float],
    after: dict[str, float],
) -> dict[str, object]:
    moves = sorted(chain(*tally.moves))
    rss, cpu = "process_resident_memory_bytes", "process_cpu_seconds_total"
    return {
        "seconds": round(took, 1),
        "games": tally.games,
        "moves": len(moves),
        "errors": len(tally.errors),
        "first_errors": tally.errors[:3],
        "moves_per_s": round(len(moves) / took),
        "p50_ms": _percentile(moves, 50),
        "p95_ms": _percentile(moves, 95),
        "p99_ms": _percentile(moves, 99),
        "max_ms": _percentile(moves, 100),
        "p99_ms_by_minute": [_percentile(sorted(minute), 99) for minute in tally.moves],
        "active_sessions": full["wordle_active_sessions"],
        "client_cpu": round(client_cpu, 2),
        "server_cpu": round((after[cpu] - before[cpu]) / took, 2),
        "server_mb": [round(seen[rss] / 1e6, 1) for seen in (before, full, after)],
    }


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """In milliseconds."""
    return round(1e3 * ordered[min(len(ordered) * percent // 100, len(ordered) - 1)], 1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Play many games at once against a running service.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--protocol", choices=PLAYERS, default="http")
    parser.add_argument("--games", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--think", type=float, default=0, help="seconds before a guess, on average")
    options = parser.parse_args()
    seconds = options.minutes * 60
    report = asyncio.run(run(options.url, options.protocol, options.games, seconds, options.think))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
