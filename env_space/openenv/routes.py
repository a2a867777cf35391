"""OpenEnv's protocol: a game per WebSocket at `/ws`, and the routes by which its tools know an environment.

Spoken here, because the `openenv` package brings a hundred others, among them Gradio and an MCP server. Its
real client and its own validation command are run against this in the tests.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, WebSocket
from starlette.websockets import WebSocketDisconnect

from env_space.metrics import Metrics
from env_space.openenv.game import Answer, Table
from env_space.openenv.models import SCHEMAS, Metadata, Schemas
from env_space.rules import Rules
from env_space.sessions import Sessions

IDLE = "Closed after {:g} s without a message; connect again and reset."


def route(app: FastAPI, sessions: Sessions, rules: Rules, metrics: Metrics) -> None:
    """Offer OpenEnv's routes on `app`."""
    app.websocket("/ws")(_serve(lambda: Table(sessions, rules), sessions.ttl_s, metrics))
    app.get("/schema")(_schema)
    app.get("/metadata")(_metadata)
    app.post("/mcp", include_in_schema=False)(_mcp)


def _serve(seat: Callable[[], Table], idle_s: float, metrics: Metrics) -> Callable[..., Any]:
    async def play(socket: WebSocket) -> None:
        await socket.accept()
        table = seat()
        try:
            await _converse(socket, table, idle_s, metrics)
        except WebSocketDisconnect:
            pass
        except TimeoutError:
            await socket.close(1001, IDLE.format(idle_s))
        finally:
            table.leave()

    return play


async def _converse(socket: WebSocket, table: Table, idle_s: float, metrics: Metrics) -> None:
    while True:
        async with asyncio.timeout(idle_s):
            raw = await _receive(socket)
        started = time.perf_counter()
        answer = table.answer(raw)
        if answer is None:
            return await socket.close()
        await socket.send_text(json.dumps(answer))
        metrics.move_took("ws", time.perf_counter() - started)


async def _receive(socket: WebSocket) -> str:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code") or 1000)
    return message.get("text") or (message.get("bytes") or b"").decode("utf-8", "replace")


async def _schema() -> Schemas:
    """The JSON schemas of what passes over `/ws`."""
    return SCHEMAS


async def _metadata() -> Metadata:
    """What this environment is."""
    return Metadata(
        name="wordle",
        description="Seeded games of Wordle over HTTP and OpenEnv's WebSocket, with exact feedback.",
        version="0.1.0",
        documentation_url="/docs",
    )


async def _mcp(request: Request) -> Answer:
    """JSON-RPC, as OpenEnv asks of every environment; a game offers no MCP tools."""
    try:
        call = json.loads(await request.body())
    except (ValueError, RecursionError):
        call = None
    call = call if isinstance(call, dict) else {}
    answer: Answer = {"jsonrpc": "2.0", "id": call.get("id")}
    if call.get("method") == "tools/list":
        return answer | {"result": {"tools": []}}
    return answer | {"error": {"code": -32601, "message": "This game has no MCP tools; play it over /ws."}}
