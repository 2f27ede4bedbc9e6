"""One peer of ours for `benchmarks.averaging`: the live replica and its network, with no training.

    python -m benchmarks.averaging.peer '{"folder": ..., "index": 0, "peers": 4, ...}'

Everything between a trainer and the wire is the node's own (`node.replica`, `node.network`, a
p2pd). Two things stand in: the trainer is a given vector, and the run's clock is set by the
benchmark, so that a round begins when it says so and not at the end of a period. Each codec is a
block of its own, so that one process can take turns between them.

Speaks JSON lines: an order on stdin, its answer on stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.averaging.swarm import lo_bytes
from node.machine.memory import keep_freed_memory
from node.network.daemon import DaemonSettings
from node.network.network import Network, NetworkSettings
from node.network.peers import NetworkPeers
from node.network.service import Handler, Reply, Status
from node.replica.board import ReplicaBoard
from node.replica.exchange import ReplicaSettings
from node.replica.replica import Replica
from node.replica.service import serve_replica
from protocol import messages
from protocol.frames import Chunks, content_digest
from protocol.log import Entry
from protocol.messages import Message
from protocol.records import Role
from swarm.consensus.fixed_point import to_float
from swarm.consensus.updates import UpdateCodec
from swarm.learning.flat import Change, Floats
from swarm.rounds import actions as act
from swarm.rounds.deadline import DeadlineRules
from swarm.rounds.state import RoundRules

RUN_FILE = b"averaging benchmark"
RUN_ID = content_digest(RUN_FILE)
PERIOD_S = 900.0  # of the benchmark's clock, which never gets that far within a round
SNAPSHOT_EVERY = 4


class GivenWeights:
    """A trainer whose weights are what it is given, and what the consensus makes of them."""

    def __init__(self, size: int) -> None:
        self.weights: Floats = np.zeros(size, dtype=np.float32)
        self.corrected = asyncio.Event()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[Floats]:
        yield self.weights  # nothing trains: they change only when they are corrected

    async def correct(self, changes: Sequence[Change]) -> None:
        for change in changes:
            change.add_to(self.weights)
        self.corrected.set()

    async def replace(self, flat: Floats) -> None:
        self.weights = flat.copy()


class GivenClock:
    """Run time: stands just before a round until the round is begun."""

    def __init__(self) -> None:
        self.base_s, self.since_s = 0.5 * PERIOD_S, time.monotonic()

    def begin(self, number: int, at_s: float) -> None:
        self.base_s, self.since_s = number * PERIOD_S, at_s

    def jump_to(self, run_time_s: float) -> None:
        self.base_s, self.since_s = run_time_s, time.monotonic()

    def __call__(self) -> float:
        return self.base_s + max(time.monotonic() - self.since_s, 0.0)


class Averager:
    """A replica of one block, with one codec."""

    def __init__(
        self, network: Network, block: int, codec: str, size: int, rules: RoundRules
    ) -> None:
        self.network, self.block = network, block
        self.trainer, self.clock = GivenWeights(size), GivenClock()
        self.handlers: dict[type, Callable[[Any, bytes], Awaitable[Reply]]] = {}
        self.entry: Entry | None = None
        self.before: Floats = np.zeros(size, dtype=np.float32)
        self.round = 0
        self.dies = False
        peers = NetworkPeers(network)
        self.board = ReplicaBoard(network, peers, block, int(Role.REPLICA), self._on_record)
        settings = ReplicaSettings(RUN_ID, block, rules, UpdateCodec(codec, size), SNAPSHOT_EVERY)
        self.replica = Replica(
            settings,
            network.identity,
            np.zeros(size, dtype=np.float32),
            peers,
            self.board,
            self.trainer,
            self.clock,
            self,
        )
        serve_replica(self, self.replica, self.board.answer, time.time)
        self.tasks = [
            asyncio.create_task(self.replica.running.queue.run()),
            asyncio.create_task(self.replica.run()),
        ]

    def serve(self, request: type[Message], handler: Handler, bulk: bool = False) -> None:
        self.handlers[request] = handler

    def _on_record(self, event: act.PeerRecord) -> None:
        self.replica.hear(event)

    # What the benchmark orders.

    def load(self, path: str) -> None:
        """What is averaged next: the consensus as it is, and a given vector on top of it."""
        self.before = to_float(self.replica.consensus.weights)
        self.trainer.weights = self.before + np.load(path)

    def begin(self, at_s: float) -> None:
        self.round += 1
        self.entry = None
        self.trainer.corrected.clear()
        self.clock.begin(self.round, at_s)
        self.replica.hear(act.Tick())

    async def finish(self) -> float:
        """Wait until the consensus made its step and the weights follow; when that was."""
        while self.entry is None or self.entry.round < self.round:
            self.trainer.corrected.clear()
            await self.trainer.corrected.wait()
        return time.monotonic()

    async def collect(self, peers: int) -> None:
        """Find the others and get their updates: the first round, in which nobody knows anybody."""
        while (stage := self.replica.state.stage) is None or len(stage.held) < peers:
            await self.board.look_up()
            await asyncio.sleep(0.1)

    def decide(self) -> None:
        """In its first round a replica waits for its deadline: let that be now."""
        stage = self.replica.state.stage
        assert stage is not None
        self.clock.jump_to(stage.first_s)
        self.replica.hear(act.Tick())

    def error(self, path: str) -> float:
        """Relative L2 distance of the consensus's step to a given mean."""
        wanted = np.load(path)
        step = to_float(self.replica.consensus.weights) - self.before
        return float(np.linalg.norm(step - wanted) / np.linalg.norm(wanted))

    def included(self) -> int:
        assert self.entry is not None
        return sum(part.scale > 0 for part in self.entry.contributions)

    # Listener: what the replica says.

    def round_began(self, number: int) -> None: ...

    def reported(self, report: act.RoundReport, update_bytes: int) -> None: ...

    def stepped(self, entry: Entry) -> None:
        self.entry = entry

    def moved(self, move: act.MoveTo, before: bytes) -> None: ...

    def excluded(self, peer: str, until_round: int, reason: str) -> None: ...

    def weights_lost(self, why: str) -> None:
        raise RuntimeError(why)

    def crowded(self) -> None: ...


class Peer:
    """The network of this process, and an averager for each codec."""

    def __init__(self, network: Network, told: dict[str, Any]) -> None:
        self.network, self.told = network, told
        deadline = DeadlineRules(told["floor_s"], told["ceiling_s"])
        window_s = told["window_s"]
        rules = RoundRules(0.0, PERIOD_S, deadline, window_s, window_s)
        self.averagers = {
            codec: Averager(network, block, codec, told["size"], rules)
            for block, codec in enumerate(told["codecs"])
        }
        self.of_block = list(self.averagers.values())
        for request in self.of_block[0].handlers:
            bulk = request in (
                messages.UpdateRequest,
                messages.AggregateRequest,
                messages.ShardRequest,
            )
            network.service.serve(request, self._answer, bulk)

    async def _answer(self, request: Any, peer_id: bytes) -> Reply:
        """As a host does for its one block, for the block that is asked for."""
        averager = self.of_block[request.block]
        reply: Reply = await averager.handlers[type(request)](request, peer_id)
        if averager.dies and isinstance(request, messages.UpdateRequest):
            assert not isinstance(reply.payload, Chunks)
            payload = bytes(reply.payload)
            chunks = Chunks(len(payload), self._half_of(payload), request.digest)
            return Reply(reply.message, chunks)
        return reply

    def _half_of(self, payload: bytes) -> Iterator[bytes]:
        """The power goes in the middle of the transfer of our update."""
        yield payload[: len(payload) // 2]
        os.kill(self.network.daemon.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        averager = self.averagers[order["codec"]]
        match order["op"]:
            case "load":
                await asyncio.to_thread(averager.load, order["path"])
            case "collect":
                averager.begin(time.monotonic())
                await averager.collect(self.told["peers"])
            case "decide":
                averager.decide()
                await averager.finish()
            case "go":
                averager.dies = order.get("dies", False)
                await asyncio.sleep(order["at_s"] - time.monotonic())
                averager.begin(order["at_s"])
                return {"seconds": await averager.finish() - order["at_s"]}
            case "check":
                error = await asyncio.to_thread(averager.error, order["path"])
                return {"error": error, "included": averager.included()}
            case "counters":
                return {
                    "lo_bytes": lo_bytes(),
                    "ledger_bytes": self.network.ledger.total().bytes_out,
                }
        return {}


async def main(told: dict[str, Any]) -> None:
    folder = Path(told["folder"])
    daemon = DaemonSettings(
        folder / f"ours{told['index']}.key", hosts=("127.0.0.1",), map_port=False
    )
    settings = NetworkSettings(daemon, RUN_ID, RUN_FILE, tuple(told["join"]))
    async with Network(settings, lambda: Status(int(Role.REPLICA), 0)) as network:
        peer = Peer(network, told)
        gc.freeze()  # these two as a host does
        keep_freed_memory()
        print(json.dumps({"join": await network.invitations()}), flush=True)
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps(await peer.obey(json.loads(line))), flush=True)
        finally:
            tasks = [task for averager in peer.of_block for task in averager.tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    import uvloop

    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        contextlib.suppress(KeyboardInterrupt),
    ):
        runner.run(main(json.loads(sys.argv[1])))
