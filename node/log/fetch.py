"""Download a block's consensus log from its replicas: entries, encoded updates, snapshots.

Donors are asked one after another, for a snapshot several at once. Content that does not match its
digest is dropped, its donor is listed as a liar, and the next one is asked. Used by replicas that
catch up, by followers of other blocks, and by the assembler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from protocol import messages
from protocol.errors import WireError
from protocol.frames import content_digest
from protocol.limits import CONTROL_DEADLINE_S, SHARD_BYTES
from protocol.log import Entry, Pin, unpack_log, unpack_pin
from protocol.messages import Message, Purpose
from protocol.payloads import unpack_index
from protocol.updates import unpack_updates
from swarm.consensus.log import check_chain
from swarm.consensus.updates import UpdateCodec, from_shards

M = TypeVar("M", bound=Message)
Quanta = npt.NDArray[np.int32]

SHARDS_AT_ONCE = 4
# Entries that replicas need to judge updates alike: scores look back 28 entries, the furthest.
MIN_HISTORY = 32


class Peers(Protocol):
    """What is needed of the network: requests to peers, with a deadline."""

    async def ask(
        self,
        peer: str,
        request: Message,
        wanted: type[M],
        deadline_s: float,
        max_payload_bytes: int | None = None,
    ) -> tuple[M, bytes]:
        """The answer and its payload. Raises `WireError` if there is none in time."""


class FetchError(WireError):
    """No donor gave what was asked for. `liars` sent content that does not match its digest."""

    def __init__(self, message: str, liars: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.liars = tuple(liars)


@dataclass(frozen=True)
class RemoteLog:
    """A donor's chain of entries, checked, and the snapshots that it has."""

    entries: tuple[Entry, ...]
    pins: tuple[Pin, ...]  # oldest first

    def starts(self, entries: Sequence[Entry]) -> list[Pin]:
        """The snapshots that a move along `entries` may have to start from.

        Empty if the donor's oldest snapshot is older than `entries`: it then has the updates of all
        of them, and no snapshot is needed.
        """
        named = {entry.digest for entry in entries}
        if self.pins and self.pins[0].entry not in named and self.pins[0].round < entries[-1].round:
            return []
        return [pin for pin in self.pins if pin.entry in named]


@dataclass
class LogFetcher:
    """Requests to the replicas of one block. The ledger counts their bytes under `purpose`."""

    peers: Peers
    run_id: bytes
    block: int
    codec: UpdateCodec
    purpose: Purpose
    ask_s: float = CONTROL_DEADLINE_S  # per request, so that a silent donor leaves time for others
    liars: list[str] = field(default_factory=list)

    async def log(self, donors: Sequence[str], have: bytes, target: bytes | None) -> RemoteLog:
        """The entries from `have` (or all that are kept) up to `target`, or to the donor's head."""
        request = messages.LogRequest(
            run=self.run_id, block=self.block, since=have, purpose=self.purpose
        )
        for donor in donors:
            try:
                reply, payload = await self.peers.ask(donor, request, messages.LogReply, self.ask_s)
                entries = tuple(e for e in unpack_log(payload))
                wanted = target or reply.consensus
                cut = next((i for i, e in enumerate(entries) if e.digest == wanted), None)
                if cut is None:
                    continue  # this donor is on another branch, or not there yet
                entries = entries[: cut + 1]
                check_chain(entries, wanted)
            except WireError:
                continue
            if not _reaches_back(entries, have):
                continue
            pins = [unpack_pin(packed, donor) for packed in reply.pins]
            return RemoteLog(entries, tuple(pins))
        raise FetchError(f"no replica of block {self.block} gave its log", self.liars)

    async def aggregate(self, donors: Sequence[str], entry: Entry) -> list[bytes]:
        """The encoded updates that went into an entry, checked against their digests."""
        included = [c.digest for c in entry.contributions if c.scale > 0]
        if not included:
            return []
        request = messages.AggregateRequest(
            run=self.run_id,
            block=self.block,
            round=entry.round,
            digest=entry.digest,
            purpose=self.purpose,
        )
        longest = self.codec.max_bytes_at(entry.round)
        most = len(included) * (longest + 16) + 64
        for donor in donors:
            try:
                _, payload = await self.peers.ask(
                    donor, request, messages.AggregateReply, self.ask_s, most
                )
            except WireError:
                continue
            with suppress(WireError):  # a malformed list counts as a lie: the frame arrived intact
                updates = unpack_updates(payload, longest)
                if [content_digest(update) for update in updates] == included:
                    return updates
            self.liars.append(donor)
        raise FetchError(f"no replica gave the aggregate of round {entry.round}", self.liars)

    async def snapshot(self, donors: Sequence[str], pin: Pin, size: int) -> Quanta:
        """The weights of a pinned entry, in shards from several donors at once.

        A donor that fails is dropped and its shards are fetched from the others. Every shard is
        checked by its digest, so a malicious donor costs one shard.
        """
        index = await self._index(donors, pin, size)
        shards: dict[int, bytes] = {}
        waiting = list(range(len(index)))
        alive = list(donors)

        async def work(place: int) -> None:
            donor = donors[place % len(donors)]
            while waiting and donor in alive:
                number = waiting.pop(0)
                try:
                    shards[number] = await self._shard(donor, pin, number, index[number])
                except WireError:
                    waiting.append(number)
                    alive.remove(donor)

        while waiting and alive:
            await asyncio.gather(*(work(i) for i in range(min(len(donors), SHARDS_AT_ONCE))))
        if waiting:
            raise FetchError("no replica gave the whole snapshot", self.liars)
        return from_shards([shards[i] for i in range(len(index))], size)

    async def _index(self, donors: Sequence[str], pin: Pin, size: int) -> list[bytes]:
        request = messages.IndexRequest(
            run=self.run_id, block=self.block, digest=pin.snapshot, purpose=self.purpose
        )
        expected = -(-4 * size // SHARD_BYTES)
        for donor in donors:
            try:
                _, payload = await self.peers.ask(donor, request, messages.IndexReply, self.ask_s)
                index = unpack_index(payload, pin.snapshot)
            except WireError:
                continue
            if len(index) == expected:
                return index
            self.liars.append(donor)
        raise FetchError("no replica gave the snapshot's index", self.liars)

    async def _shard(self, donor: str, pin: Pin, number: int, digest: bytes) -> bytes:
        request = messages.ShardRequest(
            run=self.run_id,
            block=self.block,
            digest=pin.snapshot,
            shard=number,
            purpose=self.purpose,
        )
        _, payload = await self.peers.ask(
            donor, request, messages.ShardReply, 4 * self.ask_s, SHARD_BYTES
        )
        if content_digest(payload) != digest:
            self.liars.append(donor)
            raise FetchError("a shard that is not what the index says", self.liars)
        return payload


def _reaches_back(entries: Sequence[Entry], have: bytes) -> bool:
    """Whether a chain continues ours, starts with the run, or has `MIN_HISTORY` entries."""
    first = entries[0]
    return have in (first.digest, first.parent) or first.round < 0 or len(entries) >= MIN_HISTORY
