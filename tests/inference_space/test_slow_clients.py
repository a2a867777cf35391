"""Silent and slow connections are closed, so they cannot fill the port."""

import asyncio

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from uvicorn import Config
from uvicorn.server import ServerState

from inference_space.public_port import KEEP_ALIVE_S, LIMITS, MAX_VISITORS
from space_guard.limits import limited_http
from tests.inference_space.asking import KEY, gate, running

pytestmark = pytest.mark.finding(6)

ASK = b"GET /health HTTP/1.1\r\nHost: replica\r\n"


class Link(asyncio.Transport):
    """The client's end of a connection."""

    def __init__(self, port: "Port") -> None:
        super().__init__({"peername": ("203.0.113.7", 1)})
        self.received, self.open = b"", True
        self._protocol = port.http(config=port.config, server_state=port.state, app_state={})
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
        self.http = limited_http(LIMITS, MAX_VISITORS, KEY)
        self.config = Config(gate(app or well), log_level="error", timeout_keep_alive=KEEP_ALIVE_S)
        self.config.load()
        self.state = ServerState()


async def well(_: Request) -> Response:
    return PlainTextResponse("well")


@pytest.mark.parametrize("said", [b"", b"G", ASK], ids=["nothing", "a letter", "half a head"])
def test_an_incomplete_head_ends_the_connection(said):
    async def scenario():
        link = Link(Port())
        link.send(said)
        await asyncio.sleep(LIMITS.request_s - 1)
        assert link.open
        await asyncio.sleep(2)
        return link.open

    assert running(scenario) is False


def test_the_next_head_must_also_arrive_in_time():
    async def scenario():
        link = Link(Port())
        link.send(ASK + b"\r\n")
        await asyncio.sleep(LIMITS.request_s + 5)
        assert link.received.endswith(b"well")
        assert link.open, "it is kept for the next request"
        link.send(ASK)
        for _ in range(int(LIMITS.request_s) + 2):
            link.send(b"X-Slow: 1\r\n")
            await asyncio.sleep(1)
        return link.open

    assert running(scenario) is False


def test_a_slow_answer_is_not_cut_off():
    async def scenario():
        async def slow(_: Request) -> Response:
            await asyncio.sleep(10 * LIMITS.request_s)
            return PlainTextResponse("at last")

        link = Link(Port(slow))
        link.send(ASK + b"\r\n")
        await asyncio.sleep(11 * LIMITS.request_s)
        return link.open, link.received[-7:]

    assert running(scenario) == (True, b"at last")


def test_a_request_behind_another_one_ends_both():
    """Otherwise the first would go on although its client has left."""

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


def test_the_longest_idle_visitor_is_evicted_and_no_trainer():
    async def scenario():
        port = Port()
        trainer = Link(port)
        trainer.send(ASK + f"X-Space-Key: {KEY}\r\n\r\n".encode())
        await asyncio.sleep(1)
        visitors = []
        for _ in range(MAX_VISITORS + 10):
            visitors.append(Link(port))
            visitors[-1].send(ASK + b"\r\n")
            await asyncio.sleep(0.001)
        return trainer.open, [link.open for link in visitors]

    stays, visitors = running(scenario)
    assert stays
    assert visitors == [False] * 10 + [True] * MAX_VISITORS
