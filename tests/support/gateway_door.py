"""A gateway on loopback for tests, OpenAI's client for it, and bytes that no client would send."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from openai import AsyncOpenAI

from node.gateway.outputs import OutputPlan
from node.gateway.server import Gateway, GatewaySettings
from node.serving.client import SweepClient
from swarm.learning.composition import ComposedModel
from tests.support.loopback import node, until, until_async
from tests.support.serving_swarm import Swarm

EXACT, BYTEWISE = OutputPlan("exact", 1, 6), OutputPlan("autoregressive", 1, 0)
KEY = "secret"
LONG = 4000  # bytes one by one: many seconds, so that it is still being written when we look
PATIENT_S = 12.0  # for a hop: a sweep that is sent again has another seed
LIMIT_S = 180.0  # on a machine that twenty others want, too
RESET = b" 400  413 "


@dataclass
class Door:
    """A gateway, OpenAI's client for it, and what the gateway told of its requests."""

    gateway: Gateway
    openai: AsyncOpenAI
    http: ClientSession
    told: list[dict[str, Any]]

    @property
    def root(self) -> str:
        return self.gateway.url.removesuffix("/v1")

    async def raw(self, sent: bytes) -> bytes:
        """What comes back for these bytes until the gateway closes the connection.

        It may close it before it has read all of them: then its answer may be lost on the way.
        """
        host, port = self.root.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(sent)
            return await reader.read()
        except ConnectionResetError:
            return RESET
        finally:
            writer.close()

    async def post(self, body: bytes | dict[str, Any], **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        url = f"{self.root}/v1/completions"
        async with self.http.post(url, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def health(self) -> tuple[int, Any]:
        async with self.http.get(f"{self.root}/health") as response:
            return response.status, await response.json()

    async def until_status(self, status: str) -> Any:
        """The health, as soon as it is this. A slow machine may find hosts absent for a while."""
        found: list[Any] = []

        async def is_so() -> bool:
            code, health = await self.health()
            assert code == (503 if health["status"] == "down" else 200)
            found.append(health)
            return bool(health["status"] == status)

        await until_async(is_so, 90)
        return found[-1]

    async def writing(self, outputs: int) -> None:
        await until(lambda: self.gateway.writing == outputs, 60)


@contextlib.asynccontextmanager
async def door(client: SweepClient, **settings: Any) -> AsyncIterator[Door]:
    told: list[dict[str, Any]] = []
    gateway = Gateway(client, GatewaySettings("tiny", port=0, **settings), told.append)
    await gateway.start()
    try:
        async with (
            AsyncOpenAI(base_url=gateway.url, api_key=KEY, max_retries=0) as client_,
            ClientSession() as http,
        ):
            yield Door(gateway, client_, http, told)
    finally:
        await gateway.stop()


@contextlib.asynccontextmanager
async def lonely_door(folder: Path, model: ComposedModel, **settings: Any) -> AsyncIterator[Door]:
    """A gateway before a swarm in which nobody serves."""
    async with node(folder, "a") as a:
        client = SweepClient(a, a.settings.run_id, model.run)
        async with door(client, **settings) as d:
            yield d


async def settled(s: Swarm) -> None:
    """The hosts have put away the sweeps that nobody waits for any more."""
    await until(lambda: not any(server.queue.jobs for server in s.servers.values()), 60)
