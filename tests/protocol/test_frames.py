"""Frames: limits before allocation, one typed error for each kind of bad stream, any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import WireError
from protocol.frames import (
    CHECK_BYTES,
    MAGIC,
    PREFIX_BYTES,
    BytesLike,
    Channel,
    Chunks,
    Deadline,
    DigestMismatch,
    Malformed,
    Oversize,
    Stalled,
    StreamEnded,
    Truncated,
    UnknownKind,
    VersionMismatch,
    content_digest,
    encode_head,
)
from protocol.limits import CHUNK_BYTES, HEADER_MAX_BYTES, KIND_LIMITS, Kind
from protocol.version import PROTOCOL_MAJOR, PROTOCOL_MINOR
from tests.support.loopless import BytesStream, run


def channel(data: bytes = b"", piece: int = 1 << 30) -> Channel:
    return Channel(BytesStream(data, piece), Deadline.after(60))


def stream_of(channel: Channel) -> BytesStream:
    assert isinstance(channel.stream, BytesStream)
    return channel.stream


def frame(kind: Kind = Kind.UPDATE_REPLY, header: bytes = b"\x80", payload: bytes = b"") -> bytes:
    tail = payload + content_digest(payload) if payload else b""
    return encode_head(kind, header, len(payload)) + tail


async def receive(channel: Channel, expected: bytes | None = None) -> bytes:
    head = await channel.receive_head()
    return bytes(await channel.receive_bytes(head, expected))


@given(
    header=st.binary(max_size=200),
    payload=st.binary(max_size=2000),
    piece=st.integers(1, 700),
)
def test_round_trip_in_any_pieces(header: bytes, payload: bytes, piece: int) -> None:
    sender = channel()
    digest = run(sender.send(Kind.UPDATE_REPLY, header, payload))
    wire = bytes(stream_of(sender).data)
    assert wire == frame(header=header, payload=payload)
    receiver = channel(wire, piece)
    head = run(receiver.receive_head())
    assert (head.kind, head.header, head.minor) == (Kind.UPDATE_REPLY, header, PROTOCOL_MINOR)
    assert run(receiver.receive_bytes(head, digest or None)) == payload
    assert digest == (content_digest(payload) if payload else b"")
    assert sender.tally.bytes_out == receiver.tally.bytes_in == len(wire)
    assert sender.tally.frames_out == receiver.tally.frames_in == 1


@pytest.mark.parametrize("size", [1, CHUNK_BYTES // 4, CHUNK_BYTES, CHUNK_BYTES + 1, 1_000_003])
def test_chunk_boundaries_and_iterators(size: int) -> None:
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    whole, parts = channel(), channel()
    run(whole.send(Kind.UPDATE_REPLY, b"", memoryview(payload)))
    thirds = (payload[: size // 3], bytearray(), payload[size // 3 :])
    run(parts.send(Kind.UPDATE_REPLY, b"", Chunks(size, iter(thirds))))
    for sent in (whole, parts):
        wire = bytes(stream_of(sent).data)
        assert wire == frame(header=b"", payload=payload)
        assert stream_of(sent).largest_write <= CHUNK_BYTES


@pytest.mark.parametrize("size", [9, 11])
def test_an_iterator_that_lies_about_its_size(size: int) -> None:
    with pytest.raises(ValueError, match="declared"):
        run(channel().send(Kind.UPDATE_REPLY, b"", Chunks(size, [bytes(10)])))


def test_several_frames_then_a_clean_end() -> None:
    receiver = channel(frame(payload=b"one") + frame(Kind.PING) + frame(payload=b"three"))
    assert run(receive(receiver)) == b"one"
    assert run(receive(receiver)) == b""
    assert run(receive(receiver)) == b"three"
    with pytest.raises(StreamEnded):
        run(receiver.receive_head())
    assert receiver.tally.frames_in == 3


def test_truncation_at_every_byte() -> None:
    whole = frame(header=b"\x80", payload=b"payload")
    for cut in range(1, len(whole)):
        with pytest.raises(Truncated) as caught:
            run(receive(channel(whole[:cut])))
        assert not isinstance(caught.value, StreamEnded)


def test_every_flipped_bit_is_noticed() -> None:
    whole = frame(header=b"\x81\xa1a\x01", payload=b"payload")
    for position in range(len(whole) * 8):
        changed = bytearray(whole)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(WireError):
            run(receive(channel(bytes(changed))))


def test_payload_and_wanted_content() -> None:
    good = frame(payload=b"payload")
    changed = good.replace(b"payload", b"pAyload")
    with pytest.raises(DigestMismatch, match="changed"):
        run(receive(channel(changed)))
    with pytest.raises(DigestMismatch, match="another content"):
        run(receive(channel(good), content_digest(b"other")))
    with pytest.raises(DigestMismatch, match="another content"):
        run(receive(channel(frame()), content_digest(b"other")))  # an empty answer


def raw_head(major: int, kind: int, flags: int, header: bytes, payload_bytes: int) -> bytes:
    numbers = kind.to_bytes(2, "big") + flags.to_bytes(2, "big") + len(header).to_bytes(2, "big")
    head = MAGIC + bytes([major, 7]) + numbers + payload_bytes.to_bytes(8, "big") + header
    return head + content_digest(head)[:CHECK_BYTES]


def test_a_newer_minor_version_is_understood() -> None:
    head = run(channel(raw_head(PROTOCOL_MAJOR, Kind.PING, 0x0001, b"", 0)).receive_head())
    assert (head.minor, head.flags) == (7, 1)


@pytest.mark.parametrize(
    ("major", "who"), [(PROTOCOL_MAJOR + 1, "upgrade blockswarm here"), (0, "the peer has to")]
)
def test_another_major_version_is_refused_with_a_reason(major: int, who: str) -> None:
    # Only the first 6 bytes are looked at: the rest may be laid out in any way.
    with pytest.raises(VersionMismatch, match=f"speaks protocol {major}.7") as caught:
        run(channel(MAGIC + bytes([major, 7])).receive_head())
    assert who in caught.value.hint


def test_distinct_errors() -> None:
    cases: list[tuple[bytes, type[WireError]]] = [
        (b"GET / HTTP/1.1\r\n\r\n" + bytes(40), Malformed),
        (raw_head(PROTOCOL_MAJOR, 999, 0, b"", 0), UnknownKind),
        (raw_head(PROTOCOL_MAJOR, Kind.PING, 0x8000, b"", 0), Malformed),
        (raw_head(PROTOCOL_MAJOR, Kind.PING, 0, b"", 1), Oversize),
        (raw_head(PROTOCOL_MAJOR, Kind.PING, 0, bytes(HEADER_MAX_BYTES + 1), 0), Oversize),
        (raw_head(PROTOCOL_MAJOR, Kind.UPDATE_REPLY, 0, b"", 2**63), Oversize),
        (raw_head(PROTOCOL_MAJOR, Kind.PING, 0, b"x", 0)[:-1] + b"?", Malformed),
    ]
    for data, error in cases:
        with pytest.raises(error):
            run(channel(data).receive_head())


def test_a_caller_can_be_stricter_than_the_kind() -> None:
    with pytest.raises(Oversize, match="limit is 3"):
        run(channel(frame(payload=b"four")).receive_head(max_payload_bytes=3))


def test_our_own_side_keeps_the_limits() -> None:
    sender = channel()
    with pytest.raises(Oversize):
        run(sender.send(Kind.PING, b"", b"x"))
    with pytest.raises(Oversize):
        run(sender.send(Kind.PING, bytes(HEADER_MAX_BYTES + 1)))
    assert not stream_of(sender).data


def test_an_announced_size_allocates_nothing() -> None:
    limit = KIND_LIMITS[Kind.UPDATE_REPLY].payload_bytes
    data = encode_head(Kind.UPDATE_REPLY, b"", limit) + b"few bytes"
    receiver = channel(data)
    tracemalloc.start()
    with pytest.raises(Truncated):
        run(receive(receiver))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert stream_of(receiver).largest_ask <= CHUNK_BYTES


def test_a_sink_keeps_memory_flat() -> None:
    size = 64 << 20
    chunk = bytes(CHUNK_BYTES)

    class Endless(BytesStream):
        async def read(self, max_bytes: int, timeout_s: float) -> bytes:
            if self.at < len(self.data):
                return await super().read(max_bytes, timeout_s)
            return chunk[:max_bytes]

    stream = Endless(encode_head(Kind.UPDATE_REPLY, b"", size))
    receiver = Channel(stream, Deadline.after(60))
    received = 0

    def count(data: bytes) -> None:
        nonlocal received
        received += len(data)

    tracemalloc.start()
    head = run(receiver.receive_head())
    with pytest.raises(DigestMismatch):  # its trailer is zeros
        run(receiver.receive_payload(head, count))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert received == size
    assert peak < 2 * CHUNK_BYTES


def test_deadline_is_the_smaller_of_stall_and_rest() -> None:
    now = 100.0
    deadline = Deadline.after(30, stall_s=10, clock=lambda: now)
    assert deadline.timeout_s() == 10
    now = 125.0
    assert deadline.timeout_s() == 5
    now = 130.0
    with pytest.raises(Stalled):
        deadline.timeout_s()


def test_a_slow_drip_meets_the_deadline() -> None:
    now = 0.0

    class Drip(BytesStream):
        async def read(self, max_bytes: int, timeout_s: float) -> bytes:
            nonlocal now
            now += 9.0  # always within the stall time
            return await super().read(1, timeout_s)

    slow = Channel(Drip(frame()), Deadline.after(60, stall_s=10, clock=lambda: now))
    with pytest.raises(Stalled, match="deadline"):
        run(receive(slow))


def test_the_context_closes_or_aborts() -> None:
    async def use(channel: Channel, error: BaseException | None) -> None:
        async with channel:
            if error:
                raise error

    good, bad, cancelled = channel(), channel(), channel()
    run(use(good, None))
    with pytest.raises(Truncated):
        run(use(bad, Truncated("")))
    with pytest.raises(asyncio.CancelledError):
        run(use(cancelled, asyncio.CancelledError()))
    ended = [stream_of(c).ended for c in (good, bad, cancelled)]
    assert ended == ["closed", "aborted", "aborted"]


def test_a_transport_that_returns_too_much_is_noticed() -> None:
    class Greedy(BytesStream):
        async def read(self, max_bytes: int, timeout_s: float) -> bytes:
            return bytes(max_bytes + 1)

    with pytest.raises(Malformed, match="transport"):
        run(Channel(Greedy(), Deadline.after(1)).receive_head())


PAYLOAD = bytes(range(251)) * 20_000  # 5 MB


def test_under_asyncio_with_real_sockets() -> None:
    class AsyncioStream:
        def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.reader, self.writer = reader, writer

        async def read(self, max_bytes: int, timeout_s: float) -> bytes:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self.reader.read(max_bytes)
            except TimeoutError:
                raise Stalled("no byte arrived") from None

        async def write(self, data: BytesLike, timeout_s: float) -> None:
            self.writer.write(data)
            async with asyncio.timeout(timeout_s):
                await self.writer.drain()

        async def close(self) -> None:
            self.writer.close()
            with contextlib.suppress(OSError):
                await self.writer.wait_closed()

        def abort(self) -> None:
            self.writer.transport.abort()

    async def main() -> None:
        ours, theirs = socket.socketpair()
        near = AsyncioStream(*await asyncio.open_connection(sock=ours))
        far = AsyncioStream(*await asyncio.open_connection(sock=theirs))
        async with (
            Channel(near, Deadline.after(30)) as sender,
            Channel(far, Deadline.after(30, stall_s=0.05)) as receiver,
        ):
            sending = asyncio.create_task(sender.send(Kind.UPDATE_REPLY, b"", PAYLOAD))
            assert await receive(receiver) == PAYLOAD
            await sending
            with pytest.raises(Stalled, match="no byte"):
                await receiver.receive_head()

    asyncio.run(main())


def test_under_trio_with_real_sockets() -> None:
    trio = pytest.importorskip("trio")  # py-libp2p brings it, in the extra `light`

    class TrioStream:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        async def read(self, max_bytes: int, timeout_s: float) -> bytes:
            with trio.move_on_after(timeout_s):
                return bytes(await self.stream.receive_some(max_bytes))
            raise Stalled("no byte arrived")

        async def write(self, data: BytesLike, timeout_s: float) -> None:
            with trio.fail_after(timeout_s):
                await self.stream.send_all(data)

        async def close(self) -> None:
            await self.stream.aclose()

        def abort(self) -> None:
            self.stream.socket.close()

    async def main() -> None:
        near, far = (trio.SocketStream(s) for s in trio.socket.socketpair())
        deadline = Deadline.after(30, stall_s=0.05, clock=trio.current_time)
        async with (
            Channel(TrioStream(near), Deadline.after(30, clock=trio.current_time)) as sender,
            Channel(TrioStream(far), deadline) as receiver,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(sender.send, Kind.UPDATE_REPLY, b"", PAYLOAD)
            assert await receive(receiver) == PAYLOAD
            with pytest.raises(Stalled, match="no byte"):
                await receiver.receive_head()

    trio.run(main)


def test_the_layout_is_as_small_as_the_spec_says() -> None:
    assert PREFIX_BYTES == 20
    assert len(frame(Kind.PING, b"")) == 36
    assert len(frame(payload=b"x", header=b"")) == 36 + 1 + 32
