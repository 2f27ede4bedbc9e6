"""Messages between a client and the hosts of a sweep, and the form of a route. Kinds 64 to 71.

A sweep goes from host to host (SWEEP, answered at once by SWEEP_TAKEN). The sender keeps it and
asks the receiver SWEEP_WAIT until SWEEP_HANDED says that it was handed on, and so notices a host
that stalls. The last host sends the result to the client. The payloads' arrays are `parcel.py`'s.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from protocol.identity import public_key_of
from protocol.limits import (
    BLOCK_MAX,
    BLOCK_NONE,
    DIGEST_BYTES,
    PEER_ID_BYTES,
    ROUND_MAX,
    SWEEP_BUDGET_MAX_S,
    SWEEP_CONTEXT_MAX,
    SWEEP_DRAFTS_MAX,
    SWEEP_HOP_MAX_S,
    SWEEP_HOPS_MAX,
    SWEEP_ID_BYTES,
    SWEEP_PARTS_MAX,
    SWEEP_PEERS_PER_HOP,
    SWEEP_VERSIONS_PER_REPLY,
    SWEEP_WEIGHT_MAX,
    TEXT_MAX_BYTES,
    Kind,
)
from protocol.messages import Message, Purpose
from protocol.packing import (
    Malformed,
    blob,
    block_id,
    digest,
    list_of,
    number,
    or_empty,
    text,
    uint,
    wire,
)

_HOP = struct.Struct(f">H{DIGEST_BYTES}sdB")
_VERSION = struct.Struct(f">HQ{DIGEST_BYTES}s")


class Mode(IntEnum):
    """How a sweep makes text.

    One sweep: K whole drafts, scored. Verify: one draft, with caches kept (`session`);
    autoregression verifies drafts of length 0. Denoise: all bytes of one output are denoised
    together, without a draft.
    """

    ONE_SWEEP = 1
    VERIFY = 2
    DENOISE = 3


@dataclass(frozen=True)
class Hop:
    """One block of a route: its version, its weight in the composition, the hosts to try."""

    block: int
    digest: bytes
    weight: float
    peers: tuple[bytes, ...]

    def pack(self) -> bytes:
        head = _HOP.pack(self.block, self.digest, self.weight, len(self.peers))
        return head + b"".join(self.peers)


def _peer(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise Malformed("expected a peer id")
    public_key_of(value)
    return value


def unpack_hop(data: object) -> Hop:
    """A hop as received. Raises `Malformed`."""
    if not isinstance(data, bytes) or len(data) < _HOP.size:
        raise Malformed("not a hop")
    block, version, weight, count = _HOP.unpack_from(data)
    if block > BLOCK_MAX or not 1 <= count <= SWEEP_PEERS_PER_HOP:
        raise Malformed("a hop of no block or with too many peers")
    if not 0.0 <= weight <= SWEEP_WEIGHT_MAX:  # NaN is between nothing
        raise Malformed("a hop whose weight is no weight")
    if len(data) != _HOP.size + count * PEER_ID_BYTES:
        raise Malformed("a hop of another length than it says")
    at = range(_HOP.size, len(data), PEER_ID_BYTES)
    return Hop(block, version, weight, tuple(_peer(data[i : i + PEER_ID_BYTES]) for i in at))


def _hop(value: object) -> object:
    unpack_hop(value)
    return value


@dataclass(frozen=True)
class Version:
    """A version of a block that a host can serve: its round (plus one) and its digest."""

    block: int
    round: int
    digest: bytes

    def pack(self) -> bytes:
        return _VERSION.pack(self.block, self.round, self.digest)


def unpack_version(data: object) -> Version:
    if not isinstance(data, bytes) or len(data) != _VERSION.size:
        raise Malformed("not a version")
    block, round_, name = _VERSION.unpack(data)
    if block > BLOCK_MAX or round_ > ROUND_MAX + 1:
        raise Malformed("a version of no block or round")
    return Version(block, round_, name)


def _version(value: object) -> object:
    unpack_version(value)
    return value


_id = blob(SWEEP_ID_BYTES, SWEEP_ID_BYTES)
_purpose = int(Purpose.SERVING)


@dataclass(frozen=True, kw_only=True)
class ServingRequest(Message):
    """Ask which versions a host serves and how busy it is. The round trip measures the latency."""

    KIND = Kind.SERVING_REQUEST
    run: bytes = wire("run", digest())
    purpose: int = wire("purpose", uint(255), _purpose)


@dataclass(frozen=True, kw_only=True)
class ServingReply(Message):
    """`waiting` jobs are queued, each takes about `usual_s`. `weights` (of blocks) and
    `temperature` are those of the composition."""

    KIND = Kind.SERVING_REPLY
    versions: tuple[bytes, ...] = wire("versions", list_of(_version, SWEEP_VERSIONS_PER_REPLY), ())
    waiting: int = wire("waiting", uint(65535), 0)
    usual_s: float = wire("usual", number(0, 3600), 0.0)
    weights: tuple[float, ...] = wire(
        "weights", list_of(number(0, SWEEP_WEIGHT_MAX), SWEEP_HOPS_MAX), ()
    )
    temperature: float = wire("temperature", number(1e-6, 1e6), 1.0)

    def offered(self) -> list[Version]:
        return [unpack_version(packed) for packed in self.versions]


@dataclass(frozen=True, kw_only=True)
class Sweep(Message):
    """A sweep on its way to place `place` of its route. Payload: `parcel.py`.

    `start` positions are in the caches of `session` already; `context` bytes follow them, then
    `drafts` x `length` drafted bytes, which the host of place 0 writes (with `DENOISE` it starts
    the denoising of `length` bytes, which the last host finishes). That host also fills in
    `client`, the peer that sent it the sweep. `weight` is the sum of the blocks' weights in the
    state so far.

    A one-sweep may be sent in `parts`: part 0 with the context and the first bytes of all drafts,
    the others with the bytes that follow. So hosts score the first bytes, and a slow line is in
    use, while the drafter still writes the last.
    """

    KIND = Kind.SWEEP
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    sweep: bytes = wire("sweep", _id)
    mode: int = wire("mode", uint(3, 1))
    place: int = wire("place", uint(SWEEP_HOPS_MAX - 1))
    route: tuple[bytes, ...] = wire("route", list_of(_hop, SWEEP_HOPS_MAX))
    context: int = wire("context", uint(SWEEP_CONTEXT_MAX, 1))
    drafts: int = wire("drafts", uint(SWEEP_DRAFTS_MAX, 1), 1)
    length: int = wire("length", uint(SWEEP_CONTEXT_MAX))
    part: int = wire("part", uint(SWEEP_PARTS_MAX - 1), 0)
    parts: int = wire("parts", uint(SWEEP_PARTS_MAX, 1), 1)
    start: int = wire("start", uint(SWEEP_CONTEXT_MAX), 0)
    session: bytes = wire("session", or_empty(_id), b"")
    temperature: float = wire("temperature", number(0, 100))  # of the sampling; 0: greedy
    top_k: int = wire("top_k", uint(256), 0)
    seed: int = wire("seed", uint(2**53 - 1), 0)
    composed: float = wire("composed", number(1e-6, 1e6), 1.0)  # the composition's temperature
    hidden: int = wire("hidden", uint(1), 0)  # hidden states are in the payload
    weight: float = wire("weight", number(0, SWEEP_WEIGHT_MAX * SWEEP_HOPS_MAX), 0.0)
    budget_s: float = wire("budget", number(0, SWEEP_BUDGET_MAX_S))
    hop_s: float = wire("hop", number(0.01, SWEEP_HOP_MAX_S))
    client: bytes = wire("client", or_empty(_peer), b"")
    path: tuple[bytes, ...] = wire("path", list_of(_peer, SWEEP_HOPS_MAX), ())
    missing: tuple[int, ...] = wire("missing", list_of(block_id, SWEEP_HOPS_MAX), ())
    purpose: int = wire("purpose", uint(255), _purpose)

    def hops(self) -> list[Hop]:
        return [unpack_hop(packed) for packed in self.route]

    @property
    def read(self) -> int:
        """Positions that are in the caches before this part."""
        return self.start + (self.context + self.stretch.start if self.part else 0)

    @property
    def stretch(self) -> range:
        """The bytes of each draft that are in this part; all of them if there is one part."""
        first, after = self.part * self.length, (self.part + 1) * self.length
        return range(first // self.parts, after // self.parts)

    def check(self) -> None:
        """Check the fields against each other. Raises `Malformed`."""
        hops = self.hops()
        if self.place >= len(hops) or hops[self.place].block != self.block:
            raise Malformed("a sweep that is not at a place of its route")
        blocks = [hop.block for hop in hops]
        if blocks != sorted(set(blocks)):
            raise Malformed("a route that does not go through the blocks in order")
        if self.mode == Mode.VERIFY and (self.drafts != 1 or not self.session):
            raise Malformed("a verification has one draft and a session")
        if self.mode == Mode.ONE_SWEEP and (self.session or self.start or not self.length):
            raise Malformed("one sweep has drafts and no session")
        if self.mode == Mode.DENOISE and (
            self.session or self.start or not self.length or self.drafts != 1
        ):
            raise Malformed("joint denoising has one output and no session")
        if self.parts > 1 and (self.mode != Mode.ONE_SWEEP or self.parts > self.length):
            raise Malformed("only long drafts come in parts")
        if self.part >= self.parts or (self.part and not self.place):
            raise Malformed("a part of something else")
        if self.place and not self.client:
            raise Malformed("a sweep of nobody")
        if self.start + self.context + self.length > SWEEP_CONTEXT_MAX:
            raise Malformed("a sweep longer than any context")


@dataclass(frozen=True, kw_only=True)
class SweepTaken(Message):
    """The sweep, or its result, has arrived completely."""

    KIND = Kind.SWEEP_TAKEN


@dataclass(frozen=True, kw_only=True)
class SweepWait(Message):
    """Ask whether a sweep that the host took was handed on."""

    KIND = Kind.SWEEP_WAIT
    sweep: bytes = wire("sweep", _id)
    purpose: int = wire("purpose", uint(255), _purpose)


@dataclass(frozen=True, kw_only=True)
class SweepHanded(Message):
    """`handed`: the next host or the client has the sweep, or it was given up.

    `moves` grows with every progress towards that. A host with a queue that moves, or with a busy
    next host, therefore does not count as stalled.
    """

    KIND = Kind.SWEEP_HANDED
    handed: int = wire("handed", uint(1))
    moves: int = wire("moves", uint(65535), 0)


@dataclass(frozen=True, kw_only=True)
class SweepResult(Message):
    """From the last host to the client. Payload: `parcel.py`. `path`: the hosts that computed it;
    `missing`: blocks that were skipped."""

    KIND = Kind.SWEEP_RESULT
    sweep: bytes = wire("sweep", _id)
    path: tuple[bytes, ...] = wire("path", list_of(_peer, SWEEP_HOPS_MAX))
    missing: tuple[int, ...] = wire("missing", list_of(block_id, SWEEP_HOPS_MAX), ())
    purpose: int = wire("purpose", uint(255), _purpose)


class Trouble(IntEnum):
    """Why a host could not go on with a sweep. Unknown values of newer versions stay numbers."""

    NOBODY = 1  # no host of `block` takes it
    GARBAGE = 2  # `blamed` sent arrays that `parcel.py` refuses
    NO_SESSION = 3  # a host has lost its caches: begin again from position 0
    INTERNAL = 4
    BUSY = 5  # every host of `block` that is left is busy, and time is running out
    IN_PARTS = 6  # its parts could not be handed on; in one piece it can go another way


@dataclass(frozen=True, kw_only=True)
class SweepFailed(Message):
    """To the client: the sweep failed. `blamed` is only the reporting host's claim."""

    KIND = Kind.SWEEP_FAILED
    sweep: bytes = wire("sweep", _id)
    trouble: int = wire("trouble", uint(65535))
    block: int = wire("block", block_id, BLOCK_NONE)
    blamed: bytes = wire("blamed", or_empty(_peer), b"")
    reason: str = wire("reason", text(TEXT_MAX_BYTES), "")
    purpose: int = wire("purpose", uint(255), _purpose)
