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
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from node.network import addresses
from node.network.gate import DaemonGone, Unreachable
from node.network.hivemind_parts import Multiaddr, p2pd_pb2
from node.network.p2pd_stream import CLOSE_S, P2pdStream
from node.network.stale_line import QUIET_S, greets
from protocol.errors import WireError
from protocol.frames import STREAM_PROTOCOL, Deadline, Stalled, Truncated
from protocol.identity import peer_from_text, peer_text
from protocol.limits import PEER_ID_BYTES
from protocol.packing import Malformed

CONTROL_MAX_BYTES = 1024 * 1024  # one answer of our own daemon
CONTROL_S = 10.0  # it is on this machine
DIRECT_SHARE = 0.5  # of a dial's time for direct addresses, if there are relayed ones too
OPEN_S = 3.0  # for a stream on a connection that should be there
PEERS_MET = 1024
PROBE_EVERY_S = 2.0  # whether somebody who could not be reached is back
PREAMBLE_S = 5.0
_P2P_PART = bytes([0xA5, 0x03, PEER_ID_BYTES])  # multiaddress code 421 and a length
INCOMING_STREAMS = 256  # beyond that a stream is dropped unheard
_log = logging.getLogger(__name__)


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
        self._streams: set[P2pdStream] = set()  # of both directions, until p2pd has let go
        self._closed = False
        self._met: dict[bytes, None] = {}  # peers that a stream was opened to, the latest last
        self._silent: dict[bytes, float] = {}  # peers that answer nothing, and since when
        self._unreached: dict[bytes, float] = {}  # peers that were dialled in vain, and when last

    @property
    def incoming_streams(self) -> int:
        return len(self._tasks)

    @property
    def open_streams(self) -> int:
        """Connections to p2pd, of both directions."""
        return len(self._streams)

    async def serve(self, on_stream: OnStream, protocol: str = STREAM_PROTOCOL) -> None:
        """Hand every incoming stream to `on_stream`, each in a task of its own."""
        loop = asyncio.get_running_loop()

        def accept() -> P2pdStream:
            stream = P2pdStream(self._streams)
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
            stream.remote_address, stream.peer_id = _address_text(info.addr), bytes(info.peer)
            await on_stream(stream, Caller(bytes(info.peer), stream.remote_address))
        except WireError:
            pass  # whoever serves has said what there was to say
        finally:
            stream.abort()  # a no-op after a close

    async def dial(
        self, peer_id: bytes, known: Iterable[str], deadline: Deadline, protocol: str = ""
    ) -> P2pdStream:
        """A stream to a peer: over a connection that is there, else direct, else relayed."""
        with _unreachable_at_worst():
            return await self._dial(peer_id, list(known), deadline, protocol or STREAM_PROTOCOL)

    async def _dial(
        self, peer_id: bytes, known: list[str], deadline: Deadline, protocol: str
    ) -> P2pdStream:
        ways = addresses.direct(known), addresses.relayed(known)
        if peer_id in self._silent:
            await self._renew_if_stale(peer_id, ways[0])
        if any(ways) and peer_id in self._met:
            try:  # the usual case: one question to the daemon instead of two
                return await self._open(peer_id, protocol, min(OPEN_S, deadline.timeout_s()))
            except (Unreachable, Stalled):
                self._met.pop(peer_id, None)
        if any(ways):
            await self._connect_either(peer_id, *ways, deadline)
        stream = await self._open(peer_id, protocol, deadline.timeout_s())
        self._met[peer_id] = None
        if len(self._met) > PEERS_MET:
            del self._met[next(iter(self._met))]
        return stream

    async def _open(self, peer_id: bytes, protocol: str, timeout_s: float) -> P2pdStream:
        request = p2pd_pb2.StreamOpenRequest(peer=peer_id, proto=[protocol])
        message = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request)
        stream = await self._open_control()
        try:
            answer = await self._exchange(stream, message, timeout_s)
        except BaseException:
            stream.abort()
            raise
        stream.remote_address = _address_text(answer.streamInfo.addr)
        stream.peer_id, stream.heard_s = peer_id, 0.0  # so far only our own daemon has spoken
        return stream

    def unanswered(self, peer_id: bytes, since_s: float) -> None:
        """A question that was asked then, by the loop's clock, was not answered at all."""
        if len(self._silent) < PEERS_MET:
            self._silent.setdefault(peer_id, since_s)

    def answered(self, peer_id: bytes) -> None:
        self._silent.pop(peer_id, None)

    def is_silent(self, peer_id: bytes) -> bool:
        return peer_id in self._silent

    async def _renew_if_stale(self, peer_id: bytes, direct: list[str]) -> None:
        """Let a stale connection go, so that the next stream gets a new one."""
        if not self._is_quiet(peer_id) or not await greets(direct):
            return
        # Again: several ask a peer at once, and it asks us. Whoever came first has a connection
        # that works by now, and ours would be the end of it.
        if self._is_quiet(peer_id):
            self._silent.pop(peer_id, None)
            self._met.pop(peer_id, None)
            with contextlib.suppress(WireError):
                await self.disconnect(peer_id)

    def _is_quiet(self, peer_id: bytes) -> bool:
        """Whether it has answered nothing, and nothing else was heard from it, for a while."""
        if peer_id not in self._silent:
            return False
        heard = [stream.heard_s for stream in self._streams if stream.peer_id == peer_id]
        last_s = max([self._silent[peer_id], *heard])
        return asyncio.get_running_loop().time() - last_s > QUIET_S

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
        """Make p2pd connect. It tries all addresses at once; a connection that is there will do.

        Each time it dials in vain it waits for longer before it dials again: up to 5 minutes, and
        whoever is back is unreachable for as long. So after a first failure it is not asked before
        the peer's daemon has greeted us.
        """
        with _unreachable_at_worst():
            known = list(known)
            if peer_id in self._unreached:
                known = await self._worth_dialling(peer_id, known)
            try:
                await self._connect(peer_id, known, timeout_s)
            except (Unreachable, Stalled):
                self._note_unreached(peer_id)
                raise
            self._unreached.pop(peer_id, None)

    def _note_unreached(self, peer_id: bytes) -> None:
        self._unreached[peer_id] = asyncio.get_running_loop().time()
        if len(self._unreached) > PEERS_MET:
            del self._unreached[next(iter(self._unreached))]

    async def _worth_dialling(self, peer_id: bytes, known: list[str]) -> list[str]:
        """Those of its addresses that may lead to it. Raises `Unreachable` if none does."""
        if peer_id in await self.connected():
            return known
        since_s = asyncio.get_running_loop().time() - self._unreached.get(peer_id, 0.0)
        if since_s > PROBE_EVERY_S:
            if await greets(known):
                return known
            self._note_unreached(peer_id)
        relayed = addresses.relayed(known)
        if not relayed:
            raise Unreachable("nobody answers at its addresses")
        return relayed

    async def _connect(self, peer_id: bytes, known: list[str], timeout_s: float) -> None:
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
        """End all streams, of both directions, and the tasks of the incoming ones.

        A task that is cancelled before its first step never gets to its `finally`, and whoever
        dialled may be gone as well: so the streams are ended here, whoever has them.
        """
        self._closed = True
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        streams = list(self._streams)
        for stream in streams:
            stream.abort()
        await asyncio.gather(*(stream.gone(CLOSE_S) for stream in streams))

    async def _ask(self, request: Any, timeout_s: float) -> Any:
        stream = await self._open_control()
        try:
            return await self._exchange(stream, request, timeout_s)
        finally:
            stream.abort()

    async def _open_control(self) -> P2pdStream:
        if self._closed:
            raise DaemonGone
        loop = asyncio.get_running_loop()
        stream = P2pdStream(self._streams)
        try:
            await loop.create_unix_connection(lambda: stream, str(self._control))
        except BaseException as error:  # the loop has let go of it already
            self._streams.discard(stream)
            if isinstance(error, OSError):
                raise DaemonGone from error
            raise
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


@contextlib.contextmanager
def _unreachable_at_worst() -> Iterator[None]:
    """Whatever a stranger's address breaks on the way (parsers, the resolver) is the stranger's
    trouble: who dials expects that somebody cannot be reached, and nothing else."""
    try:
        yield
    except WireError:
        raise
    except Exception as error:
        _log.debug("an address that breaks something", exc_info=True)
        raise Unreachable(f"cannot be dialled ({type(error).__name__})") from error


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
    return "".join(c if c.isprintable() else " " for c in text)[:600]
