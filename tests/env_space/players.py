"""Many games at the same time from one process, against a running service.

The guesses are drawn from the answers, so nearly all games take six.
"""

import asyncio
import json
import random
from urllib.request import urlopen


class HttpPlayer:
    """Sessions over plain HTTP, as a trainer plays them."""

    def __init__(self, url):
        import aiohttp

        self._http = aiohttp.ClientSession(url, raise_for_status=True)
        self._game = ""
        self._turn = 0

    async def start(self, seed):
        async with self._http.post("/sessions", json={"seed": seed}) as answer:
            self._game = f"/sessions/{(await answer.json())['session']}"
            self._turn = 0

    async def guess(self, word):
        self._turn += 1
        async with self._http.post(f"{self._game}/guess", json={"word": word, "turn": self._turn}) as answer:
            return (await answer.json())["done"]

    async def finish(self):
        async with self._http.delete(self._game) as answer:
            await answer.read()

    async def leave(self):
        await self._http.close()


class OpenEnvPlayer:
    """OpenEnv's own client; a WebSocket per player."""

    def __init__(self, url):
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=url, connect_timeout_s=60)

    async def start(self, seed):
        await self._client.reset(seed=seed)

    async def guess(self, word):
        return (await self._client.step({"message": f"[{word}]"})).done

    async def finish(self):
        """A reset ends the game before it."""

    async def leave(self):
        await self._client.close()


async def play(player, words, seed):
    """Play one whole game."""
    rng = random.Random(seed)
    await player.start(rng.randrange(2**31))
    while not await player.guess(rng.choice(words)):
        pass
    await player.finish()


async def play_together(kind, url, games):
    """Play `games` games at the same time; returns the errors that players met."""
    words = json.load(urlopen(f"{url}/words"))["answers"]
    players = [kind(url) for _ in range(games)]
    playing = (play(player, words, seed) for seed, player in enumerate(players))
    ended = await asyncio.gather(*playing, return_exceptions=True)
    await asyncio.gather(*(player.leave() for player in players))
    return [repr(error) for error in ended if error is not None]
