"""The second transport: py-libp2p on trio, for machines without hivemind's Go daemon.

Decides how a light client gets from an address to a `protocol.frames.Stream`: TCP, Noise (which
proves the peer id in the address), Yamux, multistream-select. Knows nothing of what is asked.

It uses py-libp2p's layers and not its host: a client that only dials needs no listener, no peer
store and no retries behind its back, and every layer's failure has its own name here.

    WireError
    ├── Unreachable        nobody answers there: refused, no route, no such name, silence
    ├── NotLibp2p          something answers, but it is no libp2p node with Noise and Yamux
    ├── WrongPeer          a libp2p node, but not the one that the address names
    ├── NotBlockswarm      the right node, but it does not speak our stream protocol
    └── Flooded            it sends more than it was allowed to; the connection was dropped

Traps of py-libp2p 0.8: it cannot share a process with hivemind (both register the same protobuf
symbols); it writes to stderr through logging's last resort; it only logs a peer that ignores its
receive windows, so that memory would grow (`_Guard`); and a read or write that was cut off by a
timeout may leave half a frame on the connection, so a stalled stream ends its whole connection.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import trio
from libp2p.abc import ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError, ParseError
from libp2p.io.exceptions import ConnectionClosedError, MessageTooLarge
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import ProtocolNotSupportedError
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream

from node.network.addresses import AddressError, is_relayed, split_peer
from node.network.gate import Unreachable
from protocol.errors import WireError
from protocol.frames import STREAM_PROTOCOL, BytesLike, Channel, Deadline, Stalled, Truncated
from protocol.identity import peer_text
from protocol.limits import MIB, SHARD_BYTES, STALL_S, STREAMS_PER_PEER
from protocol.records import HOST_PATTERN

# Without a handler, and cut off from the root logger as py-libp2p leaves it, warnings would reach
# stderr. LIBP2P_DEBUG still brings its own handlers.
logging.getLogger("libp2p").addHandler(logging.NullHandler())

# Names of protocols are short; a peer that announces a longer one is not talking to us.
NEGOTIATION_MAX_BYTES = 1024
# multistream-select begins with its own name, 19 bytes long. Whoever begins otherwise (an SSH
# server greets first, and then waits) is found out at once and not at the deadline.
NEGOTIATION_FIRST_BYTE = b"\x13"
# What may wait in memory for its reader: py-libp2p opens windows of at most 16 MiB, and a whole
# shard on each of the streams that a peer allows us is 32 MiB.
UNREAD_MAX_BYTES = STREAMS_PER_PEER * SHARD_BYTES + 8 * MIB
# Streams that a peer holds open towards us. An honest one opens a few (identify and the like).
MUXED_STREAMS_MAX = 256


class NotLibp2p(WireError):
    """Something answers at this address, but no libp2p node with Noise and Yamux."""


class WrongPeer(WireError):
    """A libp2p node answers, but it is not the one that the address names."""


class NotBlockswarm(WireError):
    """The node does not speak our stream protocol."""


class Flooded(WireError):
    """The peer ignored its limits, and the connection was dropped."""


# --- addresses ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LightAddress:
    """Where to dial, and who must answer."""

    host: str
    port: int
    peer_id: bytes

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_light_address(text: str) -> LightAddress:
    """`/ip4/1.2.3.4/tcp/31337/p2p/12D3Koo...`, or with ip6, dns, dns4, dns6."""
    if is_relayed(text):
        raise AddressError(
            "the light client cannot dial through a relay", "give the address of another peer"
        )
    peer_id, where = split_peer(text)
    match = HOST_PATTERN.fullmatch(where)
    assert match is not None
    if match[3] != "tcp" or match[5]:
        raise AddressError(
            f"the light client dials plain TCP only, not {where}",
            "give an address like /ip4/1.2.3.4/tcp/31337/p2p/12D3Koo...",
        )
    return LightAddress(match[2], int(match[4]), peer_id)


# --- a stream -----------------------------------------------------------------------------------


class LightStream:
    """`protocol.frames.Stream` on a Yamux stream."""

    def __init__(self, peer: LightPeer, muxed: YamuxStream) -> None:
        self._peer = peer
        self._muxed = muxed

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        try:
            with trio.fail_after(timeout_s):
                return await self._muxed.read(max_bytes)
        except MuxedStreamEOF:
            if self._peer.lost:
                raise self._peer.why_lost() from None
            return b""
        except MuxedStreamReset:
            raise self._peer.why_lost("the peer dropped the stream") from None
        except trio.TooSlowError:
            raise self._stalled(timeout_s) from None
        except (BaseLibp2pError, trio.ClosedResourceError, OSError) as error:
            raise self._peer.why_lost() from error

    async def write(self, data: BytesLike, timeout_s: float) -> None:
        try:
            with trio.fail_after(timeout_s):
                await self._muxed.write(bytes(data))
        except trio.TooSlowError:
            raise self._stalled(timeout_s) from None
        except (BaseLibp2pError, trio.ClosedResourceError, OSError) as error:
            if "Timed out" in str(error):  # py-libp2p's own 5 s without a window update
                raise self._stalled(timeout_s) from None
            raise self._peer.why_lost() from error

    async def close(self) -> None:
        try:
            with trio.fail_after(STALL_S):
                await self._muxed.close()
        except trio.TooSlowError:
            raise self._stalled(STALL_S) from None
        except (BaseLibp2pError, trio.ClosedResourceError, OSError) as error:
            raise self._peer.why_lost() from error

    def abort(self) -> None:
        self._peer.reset_later(self._muxed)

    def _stalled(self, timeout_s: float) -> Stalled:
        self._peer.stalled = True
        return Stalled(f"no byte from the peer within {timeout_s:.3g} s", "try again later")


# --- a connection -------------------------------------------------------------------------------


class _Reader(Protocol):
    async def read(self, n: int | None = None) -> bytes: ...
    async def write(self, data: bytes) -> None: ...


class _Negotiation:
    """multistream-select trusts the announced length of a name; this bounds all of them."""

    def __init__(self, inner: _Reader) -> None:
        self._inner = inner
        self._left_bytes = NEGOTIATION_MAX_BYTES

    async def read(self, n: int | None = None) -> bytes:
        if n is None or n > self._left_bytes:
            raise MessageTooLarge("too long for the name of a protocol")
        data = await self._inner.read(n)
        if self._left_bytes == NEGOTIATION_MAX_BYTES and data[:1] != NEGOTIATION_FIRST_BYTE:
            raise ParseError("not multistream-select")
        self._left_bytes -= len(data)
        return data

    async def write(self, data: bytes) -> None:
        await self._inner.write(data)


async def _select(inner: _Reader, protocol: str) -> None:
    communicator = MultiselectCommunicator(cast(Any, _Negotiation(inner)))
    client = MultiselectClient()
    await client.handshake(communicator)
    await client.try_select(communicator, TProtocol(protocol))


class _Guard:
    """Between Noise and Yamux: a peer that ignores its windows is dropped, not buffered."""

    def __init__(self, secured: ISecureConn) -> None:
        self._secured = secured
        self.muxer: Yamux | None = None
        self.flooded = False

    async def read(self, n: int | None = None) -> bytes:
        if self.muxer is not None:
            unread_bytes = sum(map(len, self.muxer.stream_buffers.values()))
            if unread_bytes > UNREAD_MAX_BYTES or len(self.muxer.streams) > MUXED_STREAMS_MAX:
                self.flooded = True
                raise ConnectionClosedError("the peer ignores its receive windows")
        return await self._secured.read(n)

    async def write(self, data: bytes) -> None:
        await self._secured.write(data)

    async def close(self) -> None:
        await self._secured.close()


class LightPeer:
    """One connection to a peer whose identity Noise has proven. Made by `connect`."""

    def __init__(
        self, address: LightAddress, muxer: Yamux, guard: _Guard, nursery: trio.Nursery
    ) -> None:
        self.address = address
        self.stalled = False
        self._muxer = muxer
        self._guard = guard
        self._nursery = nursery

    @property
    def lost(self) -> bool:
        """Whether another stream would be in vain: dial again."""
        return self.stalled or self._guard.flooded or self._muxer.event_shutting_down.is_set()

    def why_lost(self, otherwise: str = "the connection broke") -> WireError:
        if self._guard.flooded:
            return Flooded("the peer sends more than it was allowed to", "ask another peer")
        return Truncated(otherwise, "try again, or ask another peer")

    async def open(self, deadline: Deadline, protocol: str = STREAM_PROTOCOL) -> Channel:
        """A new stream with frames on it. Use it as a context."""
        if self.lost:
            raise self.why_lost()
        try:
            with trio.fail_after(deadline.timeout_s()):
                muxed = await self._negotiated(protocol)
        except trio.TooSlowError:
            self.stalled = True
            raise Stalled(f"{self.address} does not answer any more", "try again later") from None
        except ProtocolNotSupportedError:
            raise NotBlockswarm(
                f"{self.address} is a libp2p node, but it runs no blockswarm",
                "ask for the address of a node that runs `blockswarm`",
            ) from None
        except Exception as error:  # a stranger's bytes, as in `_upgrade`
            if self.lost:
                raise self.why_lost() from error
            raise Truncated(f"{self.address} broke off a new stream") from error
        return Channel(LightStream(self, muxed), deadline)

    async def _negotiated(self, protocol: str) -> YamuxStream:
        muxed = await self._muxer.open_stream()
        try:
            await _select(cast(_Reader, muxed), protocol)
        except BaseException:
            self.reset_later(muxed)
            raise
        return muxed

    def reset_later(self, muxed: YamuxStream) -> None:
        """Never blocks. Once `connect` is left there is nothing to reset any more."""
        try:
            self._nursery.start_soon(self._reset, muxed)
        except RuntimeError:  # the nursery is closed
            return

    async def _reset(self, muxed: YamuxStream) -> None:
        with trio.move_on_after(STALL_S):
            try:
                await muxed.reset()
            except (BaseLibp2pError, trio.ClosedResourceError, OSError):
                return

    async def serve_nothing(self) -> None:
        """Refuse what the peer opens towards us (identify, DHT). Unread, they would pile up."""
        while True:
            try:
                muxed = await self._muxer.accept_stream()
            except BaseLibp2pError:
                return  # the connection is over
            await self._reset(cast(YamuxStream, muxed))


@asynccontextmanager
async def connect(address: LightAddress, deadline: Deadline) -> AsyncIterator[LightPeer]:
    """Dial, prove the peer's identity, and keep the connection for the length of the context."""
    failure: Exception | None = None
    raw = await _dial(address, deadline)
    try:
        async with trio.open_nursery() as nursery:
            # An error that crosses a nursery becomes a group of one: carried around it instead.
            try:
                yield await _upgrade(address, raw, deadline, nursery)
            except Exception as error:
                failure = error
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await raw.close()
    if failure is not None:
        raise failure


async def _dial(address: LightAddress, deadline: Deadline) -> RawConnection:
    timeout_s = deadline.timeout_s()
    try:
        with trio.fail_after(timeout_s):
            tcp = await trio.open_tcp_stream(address.host, address.port)
    except trio.TooSlowError:
        raise Unreachable(
            f"no answer from {address} within {timeout_s:.3g} s",
            "is the port open in its firewall? --timeout waits longer",
        ) from None
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one
        raise Unreachable(
            f"cannot connect to {address}: {_reason(error)}",
            "is the node running, and is this its address and port?",
        ) from None
    return RawConnection(TrioTCPStream(tcp), True)


def _reason(error: OSError | UnicodeError) -> str:
    """What the system said. trio wraps the errors of all addresses of a name."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno).lower()
    if isinstance(error, UnicodeError):
        return "not a host name"
    return (error.strerror or str(error)).lower()


async def _upgrade(
    address: LightAddress, raw: RawConnection, deadline: Deadline, nursery: trio.Nursery
) -> LightPeer:
    """From a TCP connection to an authenticated peer with streams."""
    timeout_s = deadline.timeout_s()
    try:
        with trio.fail_after(timeout_s):
            guard = _Guard(await _secure(address, raw))
            await _select(guard, YAMUX)
    except trio.TooSlowError:
        raise Unreachable(
            f"{address} took the connection, but did not answer within {timeout_s:.3g} s",
            "is this the port of a blockswarm node?",
        ) from None
    except PeerIDMismatchesPubkey:
        raise WrongPeer(
            f"the node at {address} is not {peer_text(address.peer_id)}",
            "its identity changed, or the address is another node's: ask for the current one",
        ) from None
    except Exception as error:
        # Whatever the library raises on a stranger's handshake (and it raises much: of protobuf,
        # of the Noise package, of cryptography) is the stranger's fault.
        raise NotLibp2p(
            f"{address} is not a libp2p node with Noise and Yamux ({type(error).__name__})",
            "is this the port of a blockswarm node?",
        ) from error
    muxer = Yamux(cast(ISecureConn, guard), ID(address.peer_id), is_initiator=True)
    guard.muxer = muxer
    peer = LightPeer(address, muxer, guard, nursery)
    nursery.start_soon(muxer.start)
    await muxer.event_started.wait()
    nursery.start_soon(peer.serve_nothing)
    return peer


async def _secure(address: LightAddress, raw: RawConnection) -> ISecureConn:
    """Noise, with a key of this connection only: a light client has no identity to prove."""
    noise = NoiseTransport(create_new_key_pair(), create_new_x25519_key_pair().private_key)
    await _select(raw, NOISE)
    return await noise.secure_outbound(raw, ID(address.peer_id))
