"""Many games at the same time from one client process, against a running service; prints a report.

    python -m bench.env_load --url http://127.0.0.1:8000 --games 256 --protocol http --think 0.25

`--protocol ws` plays over `/ws` with OpenEnv's own client, so it needs an environment in which `openenv` is
installed. Each player plays complete games, one after the other. Before each guess it waits for `--think`
seconds on average, as a policy does. The guesses are drawn from the answers, so nearly all games take six.
"""

import argparse
import asyncio
import json
import random
import re
import time
from dataclasses import dataclass, field
from itertools import chain
from urllib.request import urlopen


@dataclass
class Tally:
    """What happened so far; `moves` holds the seconds of each move, for every minute of the run."""

    started: float
    games: int = 0
    moves: list[list[float]] = field(default_factory=lambda: [[]])
    errors: list[str] = field(default_factory=list)

    def count(self, seconds: float) -> None:
        if time.monotonic() - self.started > 60 * len(self.moves):
            self.moves.append([])
        self.moves[-1].append(seconds)


class HttpPlayer:
    """Sessions over plain HTTP, as a trainer plays them."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        import aiohttp

        self._http = aiohttp.ClientSession(url, headers=headers, raise_for_status=True)
        self._game, self._turn = "", 0

    async def start(self, seed: int) -> None:
        async with self._http.post("/sessions", json={"seed": seed}) as answer:
            self._game, self._turn = f"/sessions/{(await answer.json())['session']}", 0

    async def guess(self, word: str) -> bool:
        self._turn += 1
        async with self._http.post(f"{self._game}/guess", json={"word": word, "turn": self._turn}) as answer:
            return (await answer.json())["done"]

    async def finish(self) -> None:
        async with self._http.delete(self._game) as answer:
            await answer.read()

    async def leave(self) -> None:
        await self._http.close()


class OpenEnvPlayer:
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


async def play(player, words: list[str], seed: int, until: float, think: float, tally: Tally) -> None:
    """Play games, at least one, until the clock says `until`; finish the last one."""
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
        except Exception as error:  # noqa: BLE001 - errors of every kind are counted
            tally.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)
        over = time.monotonic() >= until


async def run(
    url: str, protocol: str, games: int, seconds: float, think: float = 0, key: str = ""
) -> dict[str, object]:
    """Play `games` games at the same time for `seconds`; returns the report."""
    words = json.load(urlopen(f"{url}/words"))["answers"]
    before = _server(url)
    players = [PLAYERS[protocol](url, {"X-Space-Key": key} if key else {}) for _ in range(games)]
    tally, used = Tally(time.monotonic()), time.process_time()
    end = tally.started + seconds
    tasks = [asyncio.create_task(play(p, words, seed, end, think, tally)) for seed, p in enumerate(players)]
    await asyncio.sleep(seconds * 0.8)
    full = await asyncio.to_thread(_server, url)
    await asyncio.gather(*tasks)
    took, used = time.monotonic() - tally.started, time.process_time() - used
    after = _server(url)
    await asyncio.gather(*(player.leave() for player in players))
    moves, (active, rss, cpu) = sorted(chain(*tally.moves)), SERIES
    return {
        "seconds": round(took, 1),
        "games": tally.games,
        "moves": len(moves),
        "errors": len(tally.errors),
        "first_errors": tally.errors[:3],
        "moves_per_s": round(len(moves) / took),
        **{f"{name}_ms": _percentile(moves, at) for name, at in PERCENTILES.items()},
        "p99_ms_by_minute": [_percentile(sorted(minute), 99) for minute in tally.moves],
        "active_sessions": full[active],
        "client_cpu": round(used / took, 2),
        "server_cpu": round((after[cpu] - before[cpu]) / took, 2),
        "server_mb": [round(seen[rss] / 1e6, 1) for seen in (before, full, after)],
    }


SERIES = ("wordle_active_sessions", "process_resident_memory_bytes", "process_cpu_seconds_total")
PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "max": 100}


def _server(url: str) -> dict[str, float]:
    text = urlopen(f"{url}/metrics").read().decode()
    return {name: float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1]) for name in SERIES}


def _percentile(ordered: list[float], percent: int) -> float:
    """In milliseconds."""
    return round(1e3 * ordered[min(len(ordered) * percent // 100, len(ordered) - 1)], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Play many games at the same time on a running service.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--protocol", choices=PLAYERS, default="http")
    parser.add_argument("--games", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--think", type=float, default=0, help="seconds before a guess, on average")
    given = parser.parse_args()
    playing = run(given.url, given.protocol, given.games, given.minutes * 60, given.think)
    print(json.dumps(asyncio.run(playing)))


if __name__ == "__main__":
    main()
