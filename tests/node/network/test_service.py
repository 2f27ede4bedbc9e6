"""What a node answers, on streams in memory: every basic request, refusals, places, the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from node.network.gate import Gate
from node.network.service import AGENT, Reply, Service, Status, serve_basics
from protocol import frames, messages
from protocol.frames import Channel, Chunks, Deadline, content_digest
from protocol.identity import new_identity
from protocol.ledger import Ledger
from protocol.limits import (
    BLOCK_NONE,
    EXCHANGES_PER_STREAM,
)
from protocol.messages import ErrorCode, Message, Purpose, purpose_of
from protocol.payloads import unpack_records
from protocol.records import Record, Role, SignedRecord, seal
from protocol.serving import SweepResult, SweepTaken
from tests.support.memory_stream import stream_pair

T = TypeVar("T")
RUN_FILE = b"blocks = 3\n"
RUN = content_digest(RUN_FILE)
PEER = new_identity().peer_id
UPDATE = messages.UpdateRequest(run=RUN, block=2, round=1, digest=RUN)
Talk = Callable[[Channel], Awaitable[T]]


def run(main: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(20.0):
            return await main

    return asyncio.run(bounded())


async def talk(service: Service, conversation: Talk[T], peer_id: bytes = PEER) -> T:
    """Let `conversation` be the peer on a new stream; both sides are over afterwards."""
    ours, theirs = stream_pair()
    task = asyncio.create_task(service.on_stream(ours, peer_id))
    async with Channel(theirs, Deadline.after(10.0)) as channel:
        result = await conversation(channel)
    await task
    assert ours.ended
    return result


async def ask(channel: Channel, request: Message, wanted: type[Message]) -> tuple[Any, bytearray]:
    await messages.send(channel, request)
    message, head = await messages.receive(channel, wanted)
    return message, await channel.receive_bytes(head)


async def one(
    service: Service, request: Message, wanted: type[Message], peer_id: bytes = PEER
) -> Any:
    return await talk(service, lambda channel: ask(channel, request, wanted), peer_id)


def records() -> list[SignedRecord]:
    record = Record(run=RUN, role=1, block=1, round=1, sequence=1)
    return [seal(new_identity(), record, 1e9) for _ in range(5)]


def basic_service(**changes: Any) -> tuple[Service, list[tuple[int, int]]]:
    service = Service(Ledger(), **changes)
    asked: list[tuple[int, int]] = []
    known = records()

    async def look_up(block: int, cap: int) -> list[SignedRecord]:
        asked.append((block, cap))
        return known

    status = Status(Role.REPLICA | Role.SERVER, 9, (1, 2))
    serve_basics(service, RUN, RUN_FILE, lambda: status, look_up, lambda: 1234.5)
    return service, asked


def test_hello_run_peers_ping() -> None:
    async def main() -> None:
        service, asked = basic_service()
        for run_id in (b"", RUN):
            hello, _ = await one(service, messages.Hello(run=run_id), messages.HelloReply)
            assert (hello.run, hello.round, hello.blocks) == (RUN, 9, (1, 2))
            assert (hello.role, hello.now_s, hello.agent) == (9, 1234.5, AGENT)
        reply, payload = await one(service, messages.RunRequest(run=RUN), messages.RunReply)
        assert payload == RUN_FILE and content_digest(payload) == reply.run == RUN
        request = messages.PeersRequest(run=RUN, block=1, cap=3)
        reply, payload = await one(service, request, messages.PeersReply)
        assert reply.count == 3 == len(unpack_records(payload)) and asked == [(1, 3)]
        pong, _ = await one(service, messages.Ping(nonce=b"abc"), messages.Pong)
        assert (pong.nonce, pong.now_s, pong.transfers) == (b"abc", 1234.5, 0)

    run(main())


def test_another_run_is_refused_and_the_stream_goes_on() -> None:
    async def conversation(channel: Channel) -> None:
        other = content_digest(b"another")
        for request in (
            messages.Hello(run=other),
            messages.RunRequest(run=other),
            messages.PeersRequest(run=other, block=1),
        ):
            with pytest.raises(frames.Refused) as refused:
                await ask(channel, request, messages.HelloReply)
            assert refused.value.code == ErrorCode.WRONG_RUN
        assert await ask(channel, messages.Ping(), messages.Pong)

    run(talk(basic_service()[0], conversation))


def test_many_exchanges_on_one_stream_but_not_endless() -> None:
    async def conversation(channel: Channel) -> int:
        for number in range(EXCHANGES_PER_STREAM + 5):
            try:
                await ask(channel, messages.Ping(), messages.Pong)
            except frames.Truncated:
                return number
        return -1

    assert run(talk(basic_service()[0], conversation)) == EXCHANGES_PER_STREAM


def test_a_handler_s_fault_is_not_described_to_strangers(caplog: pytest.LogCaptureFixture) -> None:
    service, _ = basic_service()

    async def broken(request: messages.UpdateRequest, _: bytes) -> Reply:
        raise RuntimeError("secret path")

    async def conversation(channel: Channel) -> None:
        with pytest.raises(frames.Refused) as refused:
            await ask(channel, UPDATE, messages.UpdateReply)
        assert refused.value.code == ErrorCode.INTERNAL and "secret" not in str(refused.value)
        assert await ask(channel, messages.Ping(), messages.Pong)

    for bulk in (False, True):
        service.serve(messages.UpdateRequest, broken, bulk)
        run(talk(service, conversation))
    assert "secret path" in caplog.text  # the operator sees it


def test_a_handler_that_hangs_costs_one_deadline() -> None:
    service, _ = basic_service(control_deadline_s=0.05)

    async def hangs(request: messages.UpdateRequest, _: bytes) -> Reply:
        await asyncio.Future()
        raise AssertionError

    async def conversation(channel: Channel) -> None:
        with pytest.raises(frames.Refused) as refused:
            await ask(channel, UPDATE, messages.UpdateReply)
        assert refused.value.code == ErrorCode.INTERNAL

    service.serve(messages.UpdateRequest, hangs, bulk=True)
    run(talk(service, conversation))
    assert service.transfers == 0


def test_a_silent_peer_is_told_and_let_go() -> None:
    async def conversation(channel: Channel) -> None:
        with pytest.raises(frames.Refused) as refused:
            await messages.receive(channel, messages.Pong)
        assert refused.value.code == ErrorCode.TOO_SLOW

    run(talk(basic_service(control_deadline_s=0.05)[0], conversation))


def test_the_time_between_questions_is_not_the_next_one_s() -> None:
    """A kept stream was silent for most of a deadline, and then a long payload follows."""
    service, _ = basic_service(control_deadline_s=1.5)  # with room for a busy machine
    taken: list[bytes] = []

    async def take(request: Message, payload: bytes, _: bytes) -> Reply:
        taken.append(payload)
        return Reply(SweepTaken())

    async def conversation(channel: Channel) -> None:
        await asyncio.sleep(1.0)  # most of a deadline ...

        def slowly() -> Iterator[bytes]:
            for _ in range(4):
                time.sleep(0.15)  # ... and what would be too much, if it counted
                yield b"x" * 1000

        await messages.send(
            channel, SweepResult(sweep=bytes(16), path=(PEER,), missing=()), Chunks(4000, slowly())
        )
        await messages.receive(channel, SweepTaken)

    service.take(SweepResult, lambda *_: contextlib.nullcontext(), take)
    run(talk(service, conversation))
    assert taken == [b"x" * 4000]


def test_a_payload_that_breaks_off_breaks_the_stream() -> None:
    service, _ = basic_service()

    def parts() -> Any:
        yield b"x" * 10
        raise OSError("disk")

    async def update(request: messages.UpdateRequest, _: bytes) -> Reply:
        return Reply(messages.UpdateReply(block=2, round=1), Chunks(1000, parts()))

    async def conversation(channel: Channel) -> None:
        with pytest.raises(frames.Truncated):
            await ask(channel, UPDATE, messages.UpdateReply)

    for bulk in (True, False):
        service.serve(messages.UpdateRequest, update, bulk)
        run(talk(service, conversation))
        assert service.transfers == 0


def test_busy_beyond_the_places_for_transfers_and_for_streams() -> None:
    async def main() -> None:
        service, _ = basic_service(updates=Gate(1), streams=Gate(3, per_peer=2))
        go_on, began = asyncio.Event(), asyncio.Event()

        async def update(request: messages.UpdateRequest, _: bytes) -> Reply:
            began.set()
            await go_on.wait()
            return Reply(messages.UpdateReply(block=2, round=1), b"payload")

        async def log(request: messages.LogRequest, _: bytes) -> Reply:
            began.set()
            await go_on.wait()
            raise frames.Refused(ErrorCode.NOT_FOUND, "no log")

        service.serve(messages.UpdateRequest, update, bulk=True)
        service.serve(messages.LogRequest, log)
        first = asyncio.create_task(one(service, UPDATE, messages.UpdateReply))
        await began.wait()

        async def conversation(channel: Channel) -> None:
            with pytest.raises(frames.Busy):
                await ask(channel, UPDATE, messages.UpdateReply)
            pong, _ = await ask(channel, messages.Ping(), messages.Pong)
            assert pong.transfers == 1
            assert await one(service, messages.Ping(), messages.Pong)  # the second one rests
            began.clear()
            asking = asyncio.create_task(
                ask(channel, messages.LogRequest(run=RUN, block=1), messages.LogReply)
            )
            await began.wait()
            with pytest.raises(frames.Busy):  # a third one at once of the same peer
                await one(service, messages.Ping(), messages.Pong)
            other = new_identity().peer_id
            assert await one(service, messages.Ping(), messages.Pong, other)
            go_on.set()
            with pytest.raises(frames.Refused):
                await asking

        await talk(service, conversation)
        _, payload = await first
        assert payload == b"payload"
        assert await one(service, messages.Ping(), messages.Pong)

    run(main())


def test_a_stream_in_the_lobby_moves_up_when_there_is_a_place() -> None:
    """Its questions are answered `busy`, one after the other; it need not be opened again."""

    async def main() -> None:
        service, _ = basic_service(streams=Gate(1))
        taken = asyncio.Event()
        leave = asyncio.Event()

        async def update(request: messages.UpdateRequest, _: bytes) -> Reply:
            taken.set()
            await leave.wait()
            return Reply(messages.UpdateReply(block=2, round=1), b"payload")

        async def holder(channel: Channel) -> None:
            assert await ask(channel, UPDATE, messages.UpdateReply)

        async def newcomer(channel: Channel) -> None:
            for _ in range(3):
                with pytest.raises(frames.Busy):
                    await ask(channel, messages.Ping(), messages.Pong)
            leave.set()
            await first
            assert await ask(channel, messages.Ping(), messages.Pong)

        service.serve(messages.UpdateRequest, update, bulk=True)
        first = asyncio.create_task(talk(service, holder))
        await taken.wait()
        await talk(service, newcomer)

    run(main())


def test_a_stream_between_two_questions_takes_no_place_unless_too_many_rest() -> None:
    async def main() -> None:
        service, _ = basic_service(streams=Gate(1))
        service._resting = Gate(2, per_peer=2)

        async def resting(channel: Channel, depth: int) -> None:
            assert await ask(channel, messages.Ping(), messages.Pong)
            if depth < 2:
                await talk(service, lambda c: resting(c, depth + 1))
            else:  # one too many to rest: it keeps its place, the only one
                assert service._resting.inside == 2 and service._streams.inside == 1
                with pytest.raises(frames.Busy):
                    await one(service, messages.Ping(), messages.Pong, new_identity().peer_id)
            assert await ask(channel, messages.Ping(), messages.Pong)

        await talk(service, lambda c: resting(c, 0))
        assert service._resting.inside == 0 and service._streams.inside == 0

    run(main())


def test_a_byte_now_and_then_after_a_refusal_does_not_hold_the_place() -> None:
    """It did, for 64 times the deadline: what follows our last words has one deadline in all."""

    class Drips:
        garbage = b"garbage-garbage-garbage"

        async def read(self, max_bytes: int, timeout_s: float) -> bytes:
            if self.garbage:
                part, self.garbage = self.garbage[:max_bytes], b""
                return part
            await asyncio.sleep(min(0.08, timeout_s))
            return b"x"

        async def write(self, data: frames.BytesLike, timeout_s: float) -> None: ...

        async def close(self) -> None: ...

        def abort(self) -> None: ...

    async def main() -> None:
        service, _ = basic_service(control_deadline_s=0.1)
        began_s = time.monotonic()
        await service.on_stream(Drips(), PEER)
        assert time.monotonic() - began_s < 1.0
        assert service._streams.inside == 0

    run(main())


def test_both_sides_book_the_same() -> None:
    requests: list[tuple[Message, int, int]] = [
        (messages.Ping(), Purpose.CONTROL, BLOCK_NONE),
        (messages.Hello(), Purpose.CONTROL, BLOCK_NONE),
        (messages.RunRequest(run=RUN), Purpose.CONTROL, BLOCK_NONE),
        (messages.PeersRequest(run=RUN, block=1), Purpose.RECORD, 1),
        (messages.VoteRequest(run=RUN, block=1, round=1), Purpose.VOTE, 1),
        (messages.LogRequest(run=RUN, block=1), Purpose.CATCH_UP, 1),
        (UPDATE, Purpose.UPDATE, 2),
        (
            messages.AggregateRequest(run=RUN, block=3, round=1, digest=RUN, purpose=5),
            Purpose.RELAY,
            3,
        ),
    ]
    service, _ = basic_service()
    ledger = Ledger()
    text = "12D3KooWpeer"

    async def conversation(channel: Channel) -> None:
        for request, purpose, block in requests:
            assert purpose_of(request) == (purpose, block)
            await messages.send(channel, request)
            head = await channel.receive_head()
            await channel.receive_bytes(head)
            ledger.book(channel.tally, text, *purpose_of(request))

    for request, _, _ in requests:
        if request.KIND not in service._entries:

            async def refuse(request: Message, _: bytes) -> Reply:
                raise frames.Refused(ErrorCode.NOT_FOUND, "not here")

            service.serve(type(request), refuse)
    run(talk(service, conversation))
    (mine,) = [
        cells for peer in service.ledger.by_peer() if (cells := service.ledger.of_peer(peer))
    ]
    theirs = ledger.of_peer(text)
    assert set(mine) == set(theirs) and len(theirs) == 6
    for cell, count in theirs.items():
        assert (count.bytes_in, count.bytes_out) == (mine[cell].bytes_out, mine[cell].bytes_in)
        assert (count.frames_in, count.frames_out) == (mine[cell].frames_out, mine[cell].frames_in)
