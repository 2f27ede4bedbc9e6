"""What a replica answers to others: records, updates, votes, its log, aggregates and snapshots.

Decides only whether the question is about what it holds. Everything served is named by its digest
or signed, so that a donor cannot be blamed for what it passes on, nor lie about it unnoticed.

The logs of the blocks that a host follows are served like its own: when a block has lost all its
hosts, their copies are what is left of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from node.log.consensus import Consensus, Shards, Snapshot
from node.network.service import Handler, Reply
from node.replica.replica import Replica
from protocol import messages
from protocol.frames import Refused
from protocol.limits import LOG_ENTRIES_PER_REPLY, SHARD_BYTES, VOTES_PER_REPLY
from protocol.log import pack_log
from protocol.messages import ErrorCode, Message
from protocol.payloads import pack_records, record_of
from protocol.records import SignedRecord
from protocol.updates import pack_updates
from protocol.votes import pack_votes
from swarm.consensus.log import ConsensusLog
from swarm.consensus.updates import shards_of

# A record that somebody shows, and who; what to show in return: our own, and those that we know.
OnRecord = Callable[[SignedRecord, bytes], Awaitable[list[SignedRecord]]]
Held = tuple[ConsensusLog, Consensus]


class Serves(Protocol):
    """What is needed of a `Service`."""

    def serve(self, request: type[Message], handler: Handler, bulk: bool = False) -> None: ...


def _no_copies(block: int) -> Held | None:
    return None


def serve_replica(
    service: Serves,
    replica: Replica,
    on_record: OnRecord,
    clock: Callable[[], float],
    copies: Callable[[int], Held | None] = _no_copies,
) -> None:
    """Answer for one replica."""
    answers = _Answers(replica, on_record, clock, copies)
    service.serve(messages.Announce, answers.announce)
    service.serve(messages.UpdateRequest, answers.update, bulk=True)
    service.serve(messages.VoteRequest, answers.votes)
    service.serve(messages.LogRequest, answers.log)
    service.serve(messages.AggregateRequest, answers.aggregate, bulk=True)
    service.serve(messages.IndexRequest, answers.index)
    service.serve(messages.ShardRequest, answers.shard, bulk=True)


class _Answers:
    def __init__(
        self,
        replica: Replica,
        on_record: OnRecord,
        clock: Callable[[], float],
        copies: Callable[[int], Held | None],
    ) -> None:
        self.replica, self.on_record, self.clock = replica, on_record, clock
        self.copies = copies
        self._one_at_a_time = asyncio.Lock()
        self._making: dict[bytes, asyncio.Task[Shards]] = {}  # by the snapshot's name

    def _check(self, run: bytes, block: int) -> None:
        settings = self.replica.settings
        if run != settings.run_id:
            raise Refused(ErrorCode.WRONG_RUN, "this peer is part of another run")
        if block != settings.block:
            raise Refused(ErrorCode.NOT_FOUND, f"this peer works on block {settings.block}")

    def _check_budget(self) -> None:
        """Bulk, and a log that would only lead to bulk: the asker goes to another donor at once."""
        if self.replica.muted:
            raise Refused(ErrorCode.NOT_ALLOWED, "this peer is over its budget of the day")

    def _held(self, run: bytes, block: int) -> Held:
        """The log and the consensus of our block, or of one that we follow."""
        self._check_budget()
        if run == self.replica.settings.run_id and block != self.replica.settings.block:
            followed = self.copies(block)
            if followed is not None:
                return followed
        self._check(run, block)
        return self.replica.state.log, self.replica.consensus

    async def announce(self, request: messages.Announce, asker: bytes) -> Reply:
        self._check(request.run, request.block)
        found = (await self.on_record(record_of(request, self.clock()), asker))[:16]
        return Reply(messages.AnnounceReply(count=len(found)), pack_records(found))

    async def update(self, request: messages.UpdateRequest, _: bytes) -> Reply:
        self._check(request.run, request.block)
        self._check_budget()
        payload = self.replica.exchange.payload(request.digest)
        if payload is None:
            raise _not_here("update")
        return Reply(messages.UpdateReply(block=request.block, round=request.round), payload)

    async def votes(self, request: messages.VoteRequest, asker: bytes) -> Reply:
        self._check(request.run, request.block)
        if request.vote:
            await self.replica.hear_vote(request.vote, asker)
        found = self.replica.votes_of(request.round)[:VOTES_PER_REPLY]
        return Reply(messages.VoteReply(count=len(found)), pack_votes(found))

    async def log(self, request: messages.LogRequest, _: bytes) -> Reply:
        log, consensus = self._held(request.run, request.block)
        entries = log.since(request.since)[-LOG_ENTRIES_PER_REPLY:]
        pins = [s.pin for entry in log.pinned() if (s := consensus.snapshots.get(entry.digest))]
        message = messages.LogReply(
            block=request.block,
            head_round=log.head.round,
            consensus=log.head.digest,
            count=len(entries),
            pins=tuple(pin.pack() for pin in pins),
        )
        return Reply(message, pack_log([entry for entry in entries]))

    async def aggregate(self, request: messages.AggregateRequest, _: bytes) -> Reply:
        consensus = self._held(request.run, request.block)[1]
        updates = consensus.updates.get(request.digest)
        if updates is None:
            raise _not_here("aggregate")
        reply = messages.AggregateReply(block=request.block, round=request.round)
        return Reply(reply, pack_updates(updates))

    async def index(self, request: messages.IndexRequest, _: bytes) -> Reply:
        consensus = self._held(request.run, request.block)[1]
        snapshot = consensus.snapshot_named(request.digest)
        if snapshot is None:
            raise _not_here("snapshot")
        size = consensus.weights.nbytes
        reply = messages.IndexReply(size_bytes=size, shards=-(-size // SHARD_BYTES))
        return Reply(reply, snapshot.index)

    async def shard(self, request: messages.ShardRequest, _: bytes) -> Reply:
        log, consensus = self._held(request.run, request.block)
        snapshot = consensus.snapshot_named(request.digest)
        if snapshot is None:
            raise _not_here("shard")
        shards = snapshot.shards or await self._made_again(log, consensus, snapshot)
        if request.shard >= len(shards):
            raise _not_here("shard")
        return Reply(messages.ShardReply(shard=request.shard), shards[request.shard])

    async def _made_again(
        self, log: ConsensusLog, consensus: Consensus, snapshot: Snapshot
    ) -> Shards:
        """One at a time, and once for all who ask: it is work of seconds.

        It goes on when whoever asked is out of time. A thread cannot be stopped; if the next one
        who asks did not wait for this one, it would begin the same work beside it.
        """
        name = snapshot.pin.snapshot
        making = self._making.get(name)
        if making is None:
            making = asyncio.create_task(self._make(log, consensus, snapshot))
            self._making[name] = making
            making.add_done_callback(lambda task: self._made(name, task))
        return await asyncio.shield(making)

    async def _make(self, log: ConsensusLog, consensus: Consensus, snapshot: Snapshot) -> Shards:
        async with self._one_at_a_time:
            weights = await asyncio.to_thread(consensus.snapshot_weights, log, snapshot)
            return () if weights is None else tuple(shards_of(weights))

    def _made(self, name: bytes, task: asyncio.Task[Shards]) -> None:
        del self._making[name]
        if not task.cancelled():
            task.exception()  # whoever still waits hears it; if nobody does, nobody complains


def _not_here(what: str) -> Refused:
    return Refused(ErrorCode.NOT_FOUND, f"this {what} is not here (any more)")
