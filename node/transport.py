"""p2pd as a carrier of our frames: raw binary streams, dialled and served, each call bounded.

Decides how bytes move between this process and its p2pd, and which typed error a dial, a stall or
a broken connection is. Knows frames only as bytes, and nothing of messages, records or the life
of the daemon (`daemon.py`).

p2pd speaks a small control protocol on a Unix socket: one connection per request, and the
connection of a STREAM_OPEN becomes the stream. We speak it ourselves instead of using hivemind's
client for three reasons: every call gets a deadline, the buffers are ours (its StreamReader stops
at 64 KiB and copies twice), and the socket for incoming streams lies in a private folder: whoever
can write to it can claim to be any peer.

p2pd closes both directions when either side closes, so a requester must keep its side open until
the answer is there; and it ends a stream whose peer was killed without an error, so an end inside
a frame is the only sign of that (`protocol.frames.Truncated`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from node import addresses
from node.gate import DaemonGone, Unreachable
from protocol.errors import WireError
from protocol.frames import STREAM_PROTOCOL, BytesLike, Deadline, Stalled, Truncated
from protocol.identity import peer_from_text, peer_text
from protocol.limits import CHUNK_BYTES, PEER_ID_BYTES
from protocol.packing import Malformed

READ_AHEAD_BYTES = 4 * CHUNK_BYTES  # held per stream before the daemon has to wait
SOCKET_BUFFER_BYTES = 4 * CHUNK_BYTES  # towards p2pd: a chunk fits while the last one is taken
WRITES_WITHOUT_PAUSE = 8  # then the loop gets its turn: a fast sender must not starve the others
CONTROL_MAX_BYTES = 1024 * 1024  # one answer of our own daemon
CONTROL_S = 10.0  # it is on this machine
DIRECT_SHARE = 0.5  # of a dial's time for direct addresses, if there are relayed ones too
PREAMBLE_S = 5.0
_P2P_PART = bytes([0xA5, 0x03, PEER_ID_BYTES])  # multiaddress code 421 and a length
INCOMING_STREAMS = 256  # beyond that a stream is dropped unheard


class P2pdStream(asyncio.Protocol):
    """One connection to p2pd: `protocol.frames.Stream` on any asyncio loop.

    Timers run only while a call really waits: a timeout around every call took a tenth of the
    throughput.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._chunks: deque[bytes] = deque()
        self._offset = 0  # into the first chunk
        self._buffered_bytes = 0
        self._ended = False
        self._broken = False
        self._reading_paused = False
        self._writing_paused = False
        self._writes = 0
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self.remote_address = ""

    # --- what the loop tells us -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # 0: a write returns when the kernel has all of it, so that the data may be reused.
        self._transport.set_write_buffer_limits(high=0)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                raw.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > READ_AHEAD_BYTES and not self._reading_paused:
            self._reading_paused = True
            assert self._transport is not None
            self._transport.pause_reading()
        _wake(self._readable)

    def eof_received(self) -> bool:
        self._ended = True
        _wake(self._readable)
        return True  # we close it ourselves, when we are through

    def connection_lost(self, error: Exception | None) -> None:
        self._broken = self._broken or error is not None
        self._ended = True
        self._writing_paused = True
        _wake(self._readable)
        _wake(self._writable)
        _wake(self._closed)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        _wake(self._writable)

    # --- protocol.frames.Stream -----------------------------------------------------------------

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        if not self._chunks:
            if not self._ended:
                self._readable = self._loop.create_future()
                await self._wait(self._readable, timeout_s)
            if not self._chunks:
                if self._broken:
                    raise Truncated("the connection broke")
                return b""
        chunk = self._chunks[0]
        if self._offset == 0 and len(chunk) <= max_bytes:
            self._chunks.popleft()
        else:
            start, end = self._offset, self._offset + max_bytes
            if end < len(chunk):
                self._offset = end
            else:
                self._chunks.popleft()
                self._offset = 0
            chunk = chunk[start:end]
        self._buffered_bytes -= len(chunk)
        if self._reading_paused and self._buffered_bytes <= READ_AHEAD_BYTES // 2:
            self._reading_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        return chunk

    async def write(self, data: BytesLike, timeout_s: float) -> None:
        self._check_writable()
        assert self._transport is not None
        self._transport.write(data)
        if self._writing_paused:
            self._writable = self._loop.create_future()
            await self._wait(self._writable, timeout_s)
            self._check_writable()
            self._writes = 0
            return
        self._writes += 1
        if self._writes >= WRITES_WITHOUT_PAUSE:
            self._writes = 0
            await asyncio.sleep(0)

    async def close(self) -> None:
        if self._transport is None:
            return
        self._transport.close()
        if not self._closed.done():
            try:
                await self._wait(self._closed, CONTROL_S)
            except Stalled:
                self._transport.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _check_writable(self) -> None:
        if self._transport is None or self._closed.done() or self._transport.is_closing():
            raise Truncated("the peer closed the stream while we were sending")

    async def _wait(self, future: asyncio.Future[None], timeout_s: float) -> None:
        timer = self._loop.call_later(timeout_s, _expire, future)
        try:
            await future
        finally:
            timer.cancel()


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def _expire(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(Stalled("no byte moved in time"))


# --- p2pd's control protocol --------------------------------------------------------------------


async def _read_exactly(stream: P2pdStream, size_bytes: int, timeout_s: float) -> bytes:
    data = b""
    while len(data) < size_bytes:
        more = await stream.read(size_bytes - len(data), timeout_s)
        if not more:
            raise DaemonGone
        data += more
    return data


async def _read_message(stream: P2pdStream, message: Any, timeout_s: float) -> Any:
    """One protobuf message with its length in front."""
    size_bytes = 0
    for shift in range(0, 28, 7):
        byte = (await _read_exactly(stream, 1, timeout_s))[0]
        size_bytes |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    if size_bytes > CONTROL_MAX_BYTES:
        raise Malformed(f"p2pd announces a message of {size_bytes} bytes")
    message.ParseFromString(await _read_exactly(stream, size_bytes, timeout_s))
    return message


def _with_length(message: Any) -> bytes:
    data = cast(bytes, message.SerializeToString())
    length, left = bytearray(), len(data)
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    length.append(left)
    return bytes(length) + data


@dataclass(frozen=True)
class Caller:
    """Who opened a stream to us. The peer id is authenticated, the address is what p2pd saw."""

    peer_id: bytes
    address: str

    @property
    def text(self) -> str:
        return peer_text(self.peer_id)


OnStream = Callable[[P2pdStream, Caller], Awaitable[None]]


class Transport:
    """Streams through one p2pd. `control` and `incoming` are Unix sockets in a private folder."""

    def __init__(self, control: Path, incoming: Path) -> None:
        self._control = control
        self._incoming = incoming
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def incoming_streams(self) -> int:
        return len(self._tasks)

    async def serve(self, on_stream: OnStream, protocol: str = STREAM_PROTOCOL) -> None:
        """Hand every incoming stream to `on_stream`, each in a task of its own."""
        loop = asyncio.get_running_loop()

        def accept() -> P2pdStream:
            stream = P2pdStream()
            task = loop.create_task(self._incoming_stream(stream, on_stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return stream

        self._server = await loop.create_unix_server(accept, str(self._incoming))
        handler = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{self._incoming}").to_bytes(), proto=[protocol], balanced=False
        )
        await self._ask(
            p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler), CONTROL_S
        )

    async def _incoming_stream(self, stream: P2pdStream, on_stream: OnStream) -> None:
        try:
            if len(self._tasks) > INCOMING_STREAMS:
                return
            info = await _read_message(stream, p2pd_pb2.StreamInfo(), PREAMBLE_S)
            stream.remote_address = _address_text(info.addr)
            await on_stream(stream, Caller(bytes(info.peer), stream.remote_address))
        except WireError:
            pass  # whoever serves has said what there was to say
        finally:
            stream.abort()  # a no-op after a close

    async def dial(
        self, peer_id: bytes, known: Iterable[str], deadline: Deadline, protocol: str = ""
    ) -> P2pdStream:
        """A stream to a peer: over a connection that is there, else direct, else relayed."""
        ways = addresses.direct(known), addresses.relayed(known)
        if any(ways):
            await self._connect_either(peer_id, *ways, deadline)
        request = p2pd_pb2.StreamOpenRequest(peer=peer_id, proto=[protocol or STREAM_PROTOCOL])
        stream = await self._open_control()
        try:
            answer = await self._exchange(
                stream,
                p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request),
                deadline.timeout_s(),
            )
        except BaseException:
            stream.abort()
            raise
        stream.remote_address = _address_text(answer.streamInfo.addr)
        return stream

    async def _connect_either(
        self, peer_id: bytes, direct: list[str], relayed: list[str], deadline: Deadline
    ) -> None:
        if direct:
            share = DIRECT_SHARE if relayed else 1.0
            try:
                await self.connect(peer_id, direct, deadline.timeout_s() * share)
                return
            except (Unreachable, Stalled):
                if not relayed:
                    raise
        await self.connect(peer_id, relayed, deadline.timeout_s())

    async def connect(self, peer_id: bytes, known: Iterable[str], timeout_s: float) -> None:
        """Make p2pd connect. It tries all addresses at once; a connection that is there will do."""
        packed = []
        for address in known:
            with contextlib.suppress(Exception):  # a stranger's address that p2pd cannot parse
                packed.append(_packed(address))
        request = p2pd_pb2.ConnectRequest(
            peer=peer_id, addrs=packed, timeout=max(1, int(timeout_s + 0.999))
        )
        message = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request)
        await self._ask(message, timeout_s)

    async def disconnect(self, peer_id: bytes) -> None:
        request = p2pd_pb2.DisconnectRequest(peer=peer_id)
        message = p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=request)
        await self._ask(message, CONTROL_S)

    async def own_addresses(self) -> list[str]:
        """What p2pd tells others about this host now, relayed addresses included."""
        answer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), CONTROL_S)
        return [text for packed in answer.identify.addrs if (text := _address_text(packed))]

    async def connected(self) -> dict[bytes, list[str]]:
        """The peers that p2pd has a connection to, and over which addresses."""
        answer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), CONTROL_S)
        return {bytes(p.id): [_address_text(packed) for packed in p.addrs] for p in answer.peers}

    async def close(self) -> None:
        """End all incoming streams and their tasks."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, request: Any, timeout_s: float) -> Any:
        stream = await self._open_control()
        try:
            return await self._exchange(stream, request, timeout_s)
        finally:
            stream.abort()

    async def _open_control(self) -> P2pdStream:
        loop = asyncio.get_running_loop()
        try:
            _, stream = await loop.create_unix_connection(P2pdStream, str(self._control))
        except OSError as error:
            raise DaemonGone from error
        return stream

    async def _exchange(self, stream: P2pdStream, request: Any, timeout_s: float) -> Any:
        try:
            await stream.write(_with_length(request), timeout_s)
            answer = await _read_message(stream, p2pd_pb2.Response(), timeout_s)
        except Truncated as error:
            raise DaemonGone from error
        if answer.type == p2pd_pb2.Response.ERROR:
            raise Unreachable(f"p2pd: {_one_line(answer.error.msg)}")
        return answer


def _packed(address: str) -> bytes:
    """A multiaddress in binary. hivemind writes peer ids inside it as CIDs, which p2pd refuses."""
    result = b""
    for place, part in enumerate(re.split(r"/p2p/([^/]+)", address)):
        if place % 2:
            result += _P2P_PART + peer_from_text(part)
        elif part:
            result += Multiaddr(part).to_bytes()
    return result


def _address_text(packed: bytes) -> str:
    try:
        return str(Multiaddr(packed))
    except Exception:  # an address type that this library does not know
        return ""


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:300]
