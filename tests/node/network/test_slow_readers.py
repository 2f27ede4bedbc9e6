"""Bulk answers that are read slowly: whose place goes to somebody else, and when.

In virtual time, on a stream that takes a pause for every piece.
"""

from __future__ import annotations

import asyncio
from typing import Any

from node.network.gate import Gate
from node.network.service import Reply, Service
from node.simulator.virtual_time import run_virtually
from protocol import frames, messages
from protocol.frames import content_digest
from protocol.identity import new_identity, peer_id_of
from protocol.ledger import Ledger
from protocol.limits import (
    BULK_GRACE_S,
    BULK_LEAST_BYTES_PER_S,
    CONCURRENT_TRANSFERS,
    TRANSFERS_PER_PEER,
    UPDATE_TRANSFERS,
    UPDATES_PER_PEER,
    Kind,
)
from protocol.messages import Message

RUN = content_digest(b"blocks = 3\n")
UPDATE = messages.UpdateRequest(run=RUN, block=2, round=1, digest=RUN)
SHARD = messages.ShardRequest(run=RUN, block=2, digest=RUN, shard=0)


class Reads:
    """A peer that asks one thing and then takes `pause_s` for every 256 KiB of the answer."""

    def __init__(self, question: bytes, pause_s: float) -> None:
        self.question, self.pause_s = question, pause_s
        self.heard, self.writes, self.aborted = b"", 0, False

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        part, self.question = self.question[:max_bytes], self.question[max_bytes:]
        return part

    async def write(self, data: frames.BytesLike, timeout_s: float) -> None:
        if self.pause_s > timeout_s:
            await asyncio.sleep(timeout_s)
            raise frames.Stalled("no byte moved in time")
        await asyncio.sleep(self.pause_s)
        self.heard += bytes(data[:64])
        self.writes += 1

    async def close(self) -> None: ...

    def abort(self) -> None:
        self.aborted = True

    @property
    def kind(self) -> int:
        """Of the answer."""
        return int.from_bytes(self.heard[6:8], "big")


def question(request: Message) -> bytes:
    return frames.encode_head(request.KIND, request.to_header(), 0)


def serving_bulk(**changes: Any) -> Service:
    service = Service(Ledger(), **changes)

    async def shard(request: messages.ShardRequest, _: bytes) -> Reply:
        return Reply(messages.ShardReply(shard=0), bytes(8 << 20))

    async def update(request: messages.UpdateRequest, _: bytes) -> Reply:
        return Reply(messages.UpdateReply(block=2, round=1), b"u" * 1000)

    service.serve(messages.ShardRequest, shard, bulk=True)
    service.serve(messages.UpdateRequest, update, bulk=True)
    return service


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def test_who_reads_slowly_does_not_keep_updates_from_others() -> None:
    """Eight slow readers of a snapshot, of two identities or of many, held all places."""

    async def main(identities: int) -> None:
        service = serving_bulk()
        tasks = [
            asyncio.create_task(
                service.on_stream(
                    Reads(question(SHARD), 9.0), peer_id_of(bytes([i % identities]) * 32)
                )
            )
            for i in range(8)
        ]
        await asyncio.sleep(1.0)
        held = service.gate.inside
        assert held == min(TRANSFERS_PER_PEER * identities, CONCURRENT_TRANSFERS)
        askers = [Reads(question(UPDATE), 0.0) for _ in range(15)]  # a round: all at once
        await asyncio.gather(*(service.on_stream(a, new_identity().peer_id) for a in askers))
        assert {asker.kind for asker in askers} == {Kind.UPDATE_REPLY}
        assert service.gate.inside == held
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    for identities in (2, 8):
        run_virtually(main(identities))


def test_a_slow_reader_loses_its_place_only_to_somebody_else() -> None:
    async def main() -> None:
        service = serving_bulk(gate=Gate(places=1, clock=loop_time))
        alone = Reads(question(SHARD), 8.0)  # 32 pieces: 4.5 minutes, where 138 s are fair
        began_s = loop_time()
        await service.on_stream(alone, new_identity().peer_id)
        assert alone.kind == Kind.SHARD_REPLY and alone.writes == 34  # head, pieces, digest
        assert loop_time() - began_s > 250.0

        slow = Reads(question(SHARD), 8.0)
        task = asyncio.create_task(service.on_stream(slow, new_identity().peer_id))
        await asyncio.sleep(100.0)
        early, late = Reads(question(SHARD), 0.0), Reads(question(SHARD), 0.0)
        await service.on_stream(early, new_identity().peer_id)
        assert early.kind == Kind.BUSY and not task.done()
        await asyncio.sleep(50.0)
        await service.on_stream(late, new_identity().peer_id)
        assert late.kind == Kind.SHARD_REPLY and late.writes == 34
        await task
        assert slow.writes < 34 and slow.aborted
        assert service.transfers == 0

    run_virtually(main())


def test_fifteen_replicas_pull_an_update_over_one_thin_line() -> None:
    """All at once, each with a fifteenth of it: slower than the least rate, and nobody's fault."""

    async def main() -> None:
        service = serving_bulk(updates=Gate(UPDATE_TRANSFERS, UPDATES_PER_PEER, clock=loop_time))

        async def update(request: messages.UpdateRequest, _: bytes) -> Reply:
            return Reply(messages.UpdateReply(block=2, round=1), bytes(1 << 20))

        service.serve(messages.UpdateRequest, update, bulk=True)
        pullers = [Reads(question(UPDATE), 9.0) for _ in range(15)]
        await asyncio.gather(*(service.on_stream(p, new_identity().peer_id) for p in pullers))
        assert {puller.writes for puller in pullers} == {6}  # head, four pieces, digest

    run_virtually(main())


def test_the_fair_time_for_a_bulk_answer_grows_with_it_and_with_our_own_slowness() -> None:
    usual = Service(Ledger())
    assert usual._fair_s(0) == BULK_GRACE_S
    assert usual._fair_s(8 << 20) == BULK_GRACE_S + (8 << 20) / BULK_LEAST_BYTES_PER_S < 150
    slow = Service(Ledger(), up_bytes_per_s=125_000.0)  # the owner's limit, for all together
    assert slow._fair_s(100_000) == BULK_GRACE_S + 100_000 / (125_000 / 32)
    assert Service(Ledger(), up_bytes_per_s=1e9)._fair_s(1 << 20) == usual._fair_s(1 << 20)
