"""Finding 6: connections that said nothing, or half of something, stayed for ever and filled the port."""

import asyncio

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from uvicorn import Config
from uvicorn.server import ServerState

from inference_space.connections import HEAD_BYTES, HEAD_S, WAITING, Connection
from inference_space.face import KEEP_ALIVE_S
from tests.security.asking import KEY, gate, running

ASK = b"GET /health HTTP/1.1\r\nHost: replica\r\n"


class Link(asyncio.Transport):
    """The client's end of a connection."""

    def __init__(self, port: "Port") -> None:
        super().__init__({"peername": ("203.0.113.7", 1)})
        self.received, self.open = b"", True
        self._protocol = Connection(port.config, port.state, {})
        self._protocol.connection_made(self)

    def send(self, data: bytes) -> None:
        if self.open:
            self._protocol.data_received(data)

    def write(self, data: bytes) -> None:
        self.received += data

    def abort(self) -> None:
        if self.open:
            self.open = False
            self._protocol.connection_lost(None)

    close = abort

    def is_closing(self) -> bool:
        return not self.open

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Port:
    """uvicorn, without a socket."""

    def __init__(self, app=None) -> None:
        self.config = Config(
            gate(app or well), http=Connection, log_level="error", timeout_keep_alive=KEEP_ALIVE_S
        )
        self.config.load()
        self.state = ServerState()


async def well(_: Request) -> Response:
    return PlainTextResponse("well")


@pytest.mark.parametrize("said", [b"", b"G", ASK], ids=["nothing", "a letter", "half a head"])
def test_a_head_that_does_not_come_ends_the_connection(said):
    async def scenario():
        link = Link(Port())
        link.send(said)
        await asyncio.sleep(HEAD_S - 1)
        assert link.open
        await asyncio.sleep(2)
        return link.open

    assert running(scenario) is False


def test_to_go_on_slowly_is_no_way_around_it():
    async def scenario():
        link = Link(Port())
        for part in range(30):
            link.send(ASK if part == 0 else b"X-Slow: 1\r\n")
            await asyncio.sleep(1)
        return link.open

    assert running(scenario) is False


def test_the_head_after_an_answer_must_come_in_time_as_well():
    async def scenario():
        link = Link(Port())
        link.send(ASK + b"\r\n")
        await asyncio.sleep(HEAD_S + 5)
        assert link.received.endswith(b"well")
        assert link.open, "it is kept for the next request"
        link.send(ASK)
        for _ in range(int(HEAD_S) + 2):
            link.send(b"X-Slow: 1\r\n")
            await asyncio.sleep(1)
        return link.open

    assert running(scenario) is False


def test_an_answer_may_take_as_long_as_it_is_allowed_to():
    async def scenario():
        async def slow(_: Request) -> Response:
            await asyncio.sleep(10 * HEAD_S)
            return PlainTextResponse("at last")

        link = Link(Port(slow))
        link.send(ASK + b"\r\n")
        await asyncio.sleep(11 * HEAD_S)
        return link.open, link.received[-7:]

    assert running(scenario) == (True, b"at last")


def test_a_request_behind_another_one_ends_both():
    """Or the first would be worked on although nobody waits for it any more."""

    async def scenario():
        gone = asyncio.Event()

        async def until_gone(request: Request) -> Response:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone.set()
            return PlainTextResponse("gone")

        link = Link(Port(until_gone))
        link.send(ASK + b"\r\n")
        await asyncio.sleep(1)
        link.send(ASK + b"\r\n")
        async with asyncio.timeout(60):
            await gone.wait()
        return link.open

    assert running(scenario) is False


def test_a_head_has_an_end():
    async def scenario():
        link = Link(Port())
        link.send(ASK)
        sent = 0
        while link.open and sent < 4 * HEAD_BYTES:
            link.send(b"X-Long: " + b"x" * 1000 + b"\r\n")
            sent += 1000
        return sent

    assert running(scenario) <= HEAD_BYTES + 1000


def test_of_many_idle_visitors_the_one_idle_for_longest_goes_and_no_trainer():
    async def scenario():
        port = Port()
        trainer = Link(port)
        trainer.send(ASK + f"X-Space-Key: {KEY}\r\n\r\n".encode())
        await asyncio.sleep(1)
        visitors = []
        for _ in range(WAITING + 10):
            visitors.append(Link(port))
            visitors[-1].send(ASK + b"\r\n")
            await asyncio.sleep(0.001)
        return trainer.open, [link.open for link in visitors]

    stays, visitors = running(scenario)
    assert stays
    assert visitors == [False] * 10 + [True] * WAITING
