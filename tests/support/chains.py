"""Consensus logs with all their data, and donors that serve them by function calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from node.log.consensus import Consensus
from node.replica.exchange import ReplicaSettings
from node.replica.service import serve_replica
from protocol.digests import weights_digest
from protocol.errors import WireError
from protocol.frames import Oversize, Stalled, content_digest
from protocol.identity import Identity, load_or_create, peer_text
from protocol.log import Contribution, Entry, genesis
from protocol.messages import Message
from protocol.updates import update_digest
from swarm.consensus.aggregate import aggregate
from swarm.consensus.fixed_point import FixedUpdate, to_fixed
from swarm.consensus.log import ConsensusLog
from swarm.consensus.sums import apply_step, summed
from swarm.consensus.updates import UpdateCodec
from swarm.rounds.deadline import DeadlineRules
from swarm.rounds.state import RoundRules

T = TypeVar("T")

SIZE = 300
RUN = content_digest(b"a run")
CODEC = UpdateCodec("topk:0.1:8", SIZE)
FIRST = np.random.default_rng(7).normal(size=SIZE).astype(np.float32)
EVERY = 4  # rounds between snapshots


def run(work: Coroutine[Any, Any, T], limit_s: float = 20.0) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await work

    return asyncio.run(bounded())


async def no_records(shown: Any, asker: bytes) -> list[Any]:
    return []


def trend_of(consensus: Consensus, log: ConsensusLog) -> FixedUpdate | None:
    """The sum of the steps that judge the next updates, or None."""
    recent = consensus.recent_steps(log)
    return summed([(step, 1) for step in recent]) if recent else None


class Chain:
    """A log that grows by one sender's random updates."""

    def __init__(self, identity: Identity, seed: int = 0, every: int = EVERY) -> None:
        self.identity, self.rng = identity, np.random.default_rng(seed)
        start = to_fixed(FIRST)
        first = genesis(RUN.hex(), 0, weights_digest(start))
        self.log = ConsensusLog((first,), every)
        self.consensus = Consensus(start, CODEC, 0)
        self.consensus.prune(self.log)

    def fork(self, seed: int) -> Chain:
        other = Chain(self.identity, seed)
        other.log, other.consensus = self.log, self.consensus.copy()
        return other

    def grow(self, rounds: int) -> Chain:
        for _ in range(rounds):
            number = self.log.head.round + 1
            wanted = self.rng.integers(-(2**20), 2**20, SIZE)
            payload, update = CODEC.encode(wanted, 0, number, self.identity.peer_id)
            result = aggregate([update], recent_norms=(), trend=None, past_scores=[()])
            new, step = apply_step(self.consensus.weights, result.delta)
            sender = peer_text(self.identity.peer_id)
            part = Contribution(update_digest(payload), sender, result.scales[0], 0)
            entry = Entry(
                number,
                self.log.head.digest,
                weights_digest(new),
                step.digest,
                result.median_norm,
                (part,),
                result.work,
            )
            included = [payload] if part.scale else []
            self.log = self.log.appended(entry)
            self.consensus.advance(entry, new, step, included)
            self.consensus.prune(self.log)
        return self


def identity(folder: Path, name: str = "sender") -> Identity:
    return load_or_create(folder / f"{name}.key")


class Donors:
    """`fetch.Peers` among chains. `spoil` changes what a donor answers; `down` ones do not."""

    def __init__(self, **chains: Chain) -> None:
        self.handlers: dict[str, dict[type, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.down: set[str] = set()
        self.spoil: dict[str, Callable[[Message, bytes], bytes]] = {}
        for name, chain in chains.items():
            self.add(name, chain)

    def add(self, name: str, chain: Chain) -> None:
        rules = RoundRules(0.0, 10.0, DeadlineRules(0.5, 1.0), 0.5, 0.5)
        replica: Any = SimpleNamespace(
            muted=False,
            settings=ReplicaSettings(RUN, 0, rules, CODEC, EVERY),
            state=chain,  # has a log, which is all that is read of a state
            consensus=chain.consensus,
        )
        served: dict[type, Any] = {}
        service: Any = SimpleNamespace(
            serve=lambda kind, handler, bulk=False: served.update({kind: handler})
        )
        serve_replica(service, replica, no_records, lambda: 0.0)
        self.handlers[name] = served

    async def ask(
        self,
        peer: str,
        request: Message,
        wanted: type[Any],
        deadline_s: float,
        max_payload_bytes: int | None = None,
    ) -> tuple[Any, bytes]:
        self.asked.append((peer, type(request).__name__))
        await asyncio.sleep(0)  # others have a turn, as on a network
        if peer in self.down or peer not in self.handlers:
            raise Stalled("nobody there")
        reply = await self.handlers[peer][type(request)](request, b"")
        payload = bytes(reply.payload)
        if peer in self.spoil:
            payload = self.spoil[peer](request, payload)
        if max_payload_bytes is not None and len(payload) > max_payload_bytes:
            raise Oversize(f"{len(payload)} bytes")
        if not isinstance(reply.message, wanted):
            raise WireError("another answer")
        return reply.message, payload
