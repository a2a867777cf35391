"""A fresh service to talk to, and what its refusals must look like."""

import asyncio

import httpx

from env_space.app import create_app
from env_space.settings import Settings


def serve(scenario, **settings):
    """Run `scenario(client)` against a fresh service."""

    async def run():
        transport = httpx.ASGITransport(create_app(Settings(**settings)))
        async with httpx.AsyncClient(transport=transport, base_url="http://wordle") as client:
            return await scenario(client)

    return asyncio.run(run())


async def start(client, seed=3):
    response = await client.post("/sessions", json={"seed": seed})
    assert response.status_code == 201
    return f"/sessions/{response.json()['session']}"


def sentence(response, status):
    """The `detail` of a refusal, which must be a sentence."""
    assert response.status_code == status, response.text
    assert response.json().keys() == {"detail"}
    assert response.json()["detail"].endswith(".")
    return response.json()["detail"]
