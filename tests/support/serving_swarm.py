"""Hosts of a tiny model that serve on loopback, and clients, all in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

from node.network.network import Network
from node.serving.client import SweepClient
from node.serving.host import serve_weights
from node.serving.output import Figures, Order, Output
from node.serving.server import BlockServer
from protocol.records import Record, Role
from swarm.learning.composition import ComposedModel
from swarm.learning.flat import flat_weights
from swarm.writing.generate import Sampling, generate
from tests.support.loopback import node, until

GREEDY = Sampling(temperature=0.0)


class Swarm:
    """Hosts of a tiny model, one block each, and a client, in one process."""

    def __init__(self, folder: Path, model: ComposedModel, stack: contextlib.AsyncExitStack):
        self.folder, self.model, self.stack = folder, model, stack
        self.hosts: dict[str, Network] = {}
        self.servers: dict[str, BlockServer] = {}
        self.said: list[str] = []
        self.clients = 0

    async def host(self, name: str, block: int) -> BlockServer:
        network = await self._network(name)
        model = self.model
        server = BlockServer(
            network, network.settings.run_id, model.run, model.weights, model.temperature
        )
        server.start()
        self.stack.push_async_callback(server.stop)
        module = model.blocks[block]
        assert module is not None
        serve_weights(server, block, 1, flat_weights(module))
        record = Record(
            run=network.settings.run_id, role=int(Role.SERVER), block=block, round=0, sequence=0
        )
        await network.announce(record)
        self.hosts[name], self.servers[name] = network, server
        return server

    async def _network(self, name: str) -> Network:
        join: list[str] = []
        if self.hosts:
            join = await next(iter(self.hosts.values())).invitations()
        return await self.stack.enter_async_context(node(self.folder, name, join))

    async def client(self, hop_min_s: float = 10.0) -> SweepClient:
        self.clients += 1
        network = await self._network(f"client{self.clients}")
        client = SweepClient(
            network, network.settings.run_id, self.model.run, self.said.append, hop_min_s
        )
        self.stack.push_async_callback(client.close)
        return client

    async def chosen(self, client: SweepClient, block: int) -> str:
        """Which host the client's route takes for this block."""
        peer = (await client.route((), {})).hops[block].peers[0]
        return next(name for name, host in self.hosts.items() if host.peer_id == peer)

    def halt(self, name: str) -> None:
        """It takes sweeps as before, and computes none until its queue is started again."""
        worker = self.servers[name].queue.worker
        assert worker is not None
        worker.cancel()


@contextlib.asynccontextmanager
async def swarm(folder: Path, model: ComposedModel, hosts: str = "abc") -> AsyncIterator[Swarm]:
    """`hosts`: a letter for each host of blocks 0, 1, 2, then a second replica of each, ..."""
    async with contextlib.AsyncExitStack() as stack:
        made = Swarm(folder, model, stack)
        for index, name in enumerate(hosts):
            if name != "-":
                await made.host(name, index % model.run.model.blocks)
        yield made


async def written(
    client: SweepClient, prompt: bytes, length: int, sampling: Sampling = GREEDY, **how: Any
) -> tuple[bytes, Figures]:
    output = Output(client, Order(prompt, length, sampling, **how))
    text = b"".join([piece async for piece in output.write()])
    return text, output.figures


async def written_together(
    s: Swarm, name: str, orders: Sequence[Coroutine[Any, Any, tuple[bytes, Figures]]]
) -> list[tuple[bytes, Figures]]:
    """What `written` returns of each, when all of them wait in one host before it computes any."""
    queue = s.servers[name].queue
    s.halt(name)
    writing = asyncio.gather(*orders)
    await until(lambda: len(queue.waiting) == len(orders))
    queue.start()
    return await writing


def local(model: ComposedModel, prompt: bytes, length: int) -> bytes:
    return bytes(generate(model, prompt, length, GREEDY))


async def idle(s: Swarm) -> None:
    queues = [server.queue for server in s.servers.values()]
    await until(lambda: not any(queue.jobs or queue.held_bytes for queue in queues))
