"""Every message: a frozen dataclass, the kind of frame it travels in, and its schema.

Decides what peers may ask each other and the form of the answers. Knows nothing of how an answer
is found, nor of what a payload means (`payloads.py`, the tensor codecs). A request is one frame,
its answer one frame; `BusyReply` and `ErrorReply` may answer anything. Field names on the wire
are in `wire(...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, TypeVar

from protocol import frames
from protocol.errors import WireError
from protocol.frames import BytesLike, Channel, Chunks, Head
from protocol.limits import (
    BLOCK_NONE,
    BLOCKS_PER_HELLO,
    BUSY_RETRY_MAX_S,
    CE_MAX_NATS,
    DHT_KEY_BYTES,
    HEADER_MAX_BYTES,
    IP_MAX_BYTES,
    LOG_ENTRIES_PER_REPLY,
    PEER_ID_BYTES,
    PIN_BYTES,
    PINS_PER_LOG,
    RECORD_MAX_BYTES,
    RECORDS_PER_ANNOUNCE,
    RECORDS_PER_REPLY,
    ROUND_MAX,
    SHARDS_PER_SNAPSHOT,
    SIGNATURE_BYTES,
    SIZE_MAX_BYTES,
    TEXT_MAX_BYTES,
    TIME_MAX_S,
    VOTE_BLOB_MAX_BYTES,
    VOTES_PER_REPLY,
    Kind,
)
from protocol.packing import (
    Malformed,
    blob,
    block_id,
    digest,
    digest_or_empty,
    from_map,
    list_of,
    number,
    pack,
    round_or_genesis,
    text,
    to_map,
    uint,
    unpack_map,
    wire,
)
from protocol.records import RecordError

M = TypeVar("M", bound="Message")

# Every message class, as it is defined: here, and in `serving.py` where a node serves.
_BY_KIND: dict[Kind, type[Message]] = {}


class Purpose(IntEnum):
    """Why bytes move; the ledger counts by it. A request says it, so that both sides agree."""

    CONTROL = 0
    UPDATE = 1
    VOTE = 2
    REPAIR = 3
    CATCH_UP = 4
    RELAY = 5
    RECORD = 6
    ASSEMBLY = 7
    SERVING = 8


class ErrorCode(IntEnum):
    """Why a request was refused. Unknown codes of newer versions stay plain numbers."""

    MALFORMED = 1  # the request is not what the spec says
    VERSION = 2  # another major version
    UNKNOWN_KIND = 3  # a kind that this version does not know, or that is no request
    OVERSIZE = 4  # a length above its limit
    DIGEST = 5  # a payload that does not match its digest
    NOT_FOUND = 6  # not here (any more)
    WRONG_RUN = 7  # this peer is part of another run
    NOT_ALLOWED = 8  # understood, and refused: budget, policy, a sender left out
    TOO_SLOW = 9  # the request did not arrive within its deadline
    INTERNAL = 10  # a fault of the answering side


class DialOutcome(IntEnum):
    """What came of one knock at a peer's door. Unknown ones of newer versions stay numbers."""

    NOT_TRIED = 0  # no address that may be dialled: over a relay, or of the answering machine
    REACHED = 1  # a libp2p node answers there
    REFUSED = 2  # the machine is there, nothing listens on the port
    TIMED_OUT = 3  # no answer at all
    UNREACHABLE = 4  # no way to that address from here
    NOT_LIBP2P = 5  # something else listens there


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base: `to_header` and `decode` are the only two ways to and from the wire."""

    KIND: ClassVar[Kind]

    def __init_subclass__(cls) -> None:
        _BY_KIND[cls.KIND] = cls

    def to_header(self) -> bytes:
        header = pack(to_map(self))
        if len(header) > HEADER_MAX_BYTES:
            raise frames.Oversize(f"{type(self).__name__} needs {len(header)} bytes of header")
        return header


# --- getting to know a peer ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """Who are you, and which run is this? `run` empty: whichever you are part of."""

    KIND = Kind.HELLO
    run: bytes = wire("run", digest_or_empty(), b"")
    agent: str = wire("agent", text(64), "")


@dataclass(frozen=True, kw_only=True)
class HelloReply(Message):
    """`now_s` is the peer's clock (Unix time), for the median offset of the rounds' clock.

    `ce_nats` is its own measurement of its block's consensus on its own held-out bytes, and
    `own_ce_nats` that of its own running weights; 0: none.
    """

    KIND = Kind.HELLO_REPLY
    run: bytes = wire("run", digest())
    role: int = wire("role", uint(0xFFFF))
    round: int = wire("round", uint(ROUND_MAX))
    now_s: float = wire("now", number(0, TIME_MAX_S))
    blocks: tuple[int, ...] = wire("blocks", list_of(block_id, BLOCKS_PER_HELLO), ())
    agent: str = wire("agent", text(64), "")
    ce_nats: float = wire("ce", number(0, CE_MAX_NATS), 0.0)
    own_ce_nats: float = wire("own_ce", number(0, CE_MAX_NATS), 0.0)


@dataclass(frozen=True, kw_only=True)
class RunRequest(Message):
    """Send the run file with this digest."""

    KIND = Kind.RUN_REQUEST
    run: bytes = wire("run", digest())


@dataclass(frozen=True, kw_only=True)
class RunReply(Message):
    """Payload: the run file, whose content digest is `run`."""

    KIND = Kind.RUN_REPLY
    run: bytes = wire("run", digest())


@dataclass(frozen=True, kw_only=True)
class PeersRequest(Message):
    """Send the peers' records of a block, or (`block` = BLOCK_NONE) of all that you know."""

    KIND = Kind.PEERS_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    cap: int = wire("cap", uint(RECORDS_PER_REPLY, 1), RECORDS_PER_REPLY)


@dataclass(frozen=True, kw_only=True)
class PeersReply(Message):
    """Payload: `pack_records`, as they were signed; the asker verifies them itself."""

    KIND = Kind.PEERS_REPLY
    count: int = wire("count", uint(RECORDS_PER_REPLY))


@dataclass(frozen=True, kw_only=True)
class Announce(Message):
    """Here is my record of this block, as I signed it (`payloads.announce_of`, `record_of`).

    What the DHT spreads within seconds, two replicas that know each other tell at once.
    """

    KIND = Kind.ANNOUNCE
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    key: bytes = wire("key", blob(DHT_KEY_BYTES, DHT_KEY_BYTES))
    subkey: bytes = wire("subkey", blob(PEER_ID_BYTES + 2, PEER_ID_BYTES + 2))
    value: bytes = wire("value", blob(SIGNATURE_BYTES, RECORD_MAX_BYTES))
    expiration_s: float = wire("expiration", number(0, TIME_MAX_S))


@dataclass(frozen=True, kw_only=True)
class AnnounceReply(Message):
    """Payload: `pack_records`: the answerer's own record of the block (if any), then others'."""

    KIND = Kind.ANNOUNCE_REPLY
    count: int = wire("count", uint(RECORDS_PER_ANNOUNCE))


@dataclass(frozen=True, kw_only=True)
class Ping(Message):
    KIND = Kind.PING
    nonce: bytes = wire("nonce", blob(0, 16), b"")


@dataclass(frozen=True, kw_only=True)
class Pong(Message):
    """`now_s` as in `HelloReply`; `transfers` is how many run there now."""

    KIND = Kind.PONG
    nonce: bytes = wire("nonce", blob(0, 16), b"")
    now_s: float = wire("now", number(0, TIME_MAX_S))
    transfers: int = wire("transfers", uint(65535), 0)


@dataclass(frozen=True, kw_only=True)
class DialBack(Message):
    """Can you reach me? Open a new connection to the IP that you see me at, on this port.

    There is no field for an address: nobody can be made to dial a third party.
    """

    KIND = Kind.DIAL_BACK
    run: bytes = wire("run", digest())
    port: int = wire("port", uint(65535, 1))


@dataclass(frozen=True, kw_only=True)
class DialBackReply(Message):
    """`outcome` is a `DialOutcome`; `observed` the IP, empty over a relay."""

    KIND = Kind.DIAL_BACK_REPLY
    outcome: int = wire("outcome", uint(255))
    observed: str = wire("observed", text(IP_MAX_BYTES), "")


# --- a round ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UpdateRequest(Message):
    """Send the update with this digest, yours or another replica's that you hold."""

    KIND = Kind.UPDATE_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    round: int = wire("round", uint(ROUND_MAX))
    digest: bytes = wire("digest", digest())
    purpose: int = wire("purpose", uint(255), int(Purpose.UPDATE))


@dataclass(frozen=True, kw_only=True)
class UpdateReply(Message):
    """Payload: the encoded update, whose content digest is the one asked for."""

    KIND = Kind.UPDATE_REPLY
    block: int = wire("block", block_id)
    round: int = wire("round", uint(ROUND_MAX))


@dataclass(frozen=True, kw_only=True)
class VoteRequest(Message):
    """Here is my vote (`seal_vote`'s blob; empty: I only ask). Which ones do you hold?"""

    KIND = Kind.VOTE_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    round: int = wire("round", uint(ROUND_MAX))
    vote: bytes = wire("vote", blob(0, VOTE_BLOB_MAX_BYTES), b"")


@dataclass(frozen=True, kw_only=True)
class VoteReply(Message):
    """Payload: `pack_votes` of that block and round, the answering peer's own one first."""

    KIND = Kind.VOTE_REPLY
    count: int = wire("count", uint(VOTES_PER_REPLY))


# --- the consensus log --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LogRequest(Message):
    """What is your head of this block's log, and what led to it?

    `since` is the digest of the head that the asker has; empty: from the oldest entry kept.
    """

    KIND = Kind.LOG_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    since: bytes = wire("since", digest_or_empty(), b"")
    purpose: int = wire("purpose", uint(255), int(Purpose.CATCH_UP))


@dataclass(frozen=True, kw_only=True)
class LogReply(Message):
    """The head (its round plus one, its digest), the snapshots (`Pin`), as payload `pack_log`.

    The entries begin with `since` itself if the answerer has it, otherwise with its oldest; of
    more than LOG_ENTRIES_PER_REPLY the newest are sent, so that the head is always among them.
    """

    KIND = Kind.LOG_REPLY
    block: int = wire("block", block_id)
    head_round: int = round_or_genesis("round")
    consensus: bytes = wire("consensus", digest())
    count: int = wire("count", uint(LOG_ENTRIES_PER_REPLY))
    pins: tuple[bytes, ...] = wire("pins", list_of(blob(PIN_BYTES, PIN_BYTES), PINS_PER_LOG), ())


@dataclass(frozen=True, kw_only=True)
class AggregateRequest(Message):
    """Send the updates that went into a log entry."""

    KIND = Kind.AGGREGATE_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    round: int = round_or_genesis("round")
    digest: bytes = wire("digest", digest())
    purpose: int = wire("purpose", uint(255), int(Purpose.CATCH_UP))


@dataclass(frozen=True, kw_only=True)
class AggregateReply(Message):
    """Payload: `pack_updates`: contributions with a scale above 0, in the entry's order."""

    KIND = Kind.AGGREGATE_REPLY
    block: int = wire("block", block_id)
    round: int = round_or_genesis("round")


@dataclass(frozen=True, kw_only=True)
class IndexRequest(Message):
    """Which shards make up the snapshot with this digest?"""

    KIND = Kind.INDEX_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    digest: bytes = wire("digest", digest())
    purpose: int = wire("purpose", uint(255), int(Purpose.CATCH_UP))


@dataclass(frozen=True, kw_only=True)
class IndexReply(Message):
    """Payload: the digests of the shards, one after the other.

    A snapshot is *named* by the content digest of this payload, so a liar is found out before
    the first shard is fetched.
    """

    KIND = Kind.INDEX_REPLY
    size_bytes: int = wire("size", uint(SIZE_MAX_BYTES, 1))
    shards: int = wire("shards", uint(SHARDS_PER_SNAPSHOT, 1))


@dataclass(frozen=True, kw_only=True)
class ShardRequest(Message):
    """Send shard number `shard` of the snapshot `digest`."""

    KIND = Kind.SHARD_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    digest: bytes = wire("digest", digest())
    shard: int = wire("shard", uint(SHARDS_PER_SNAPSHOT - 1))
    purpose: int = wire("purpose", uint(255), int(Purpose.CATCH_UP))


@dataclass(frozen=True, kw_only=True)
class ShardReply(Message):
    """Payload: the bytes of the shard, whose content digest is the index's entry for it."""

    KIND = Kind.SHARD_REPLY
    shard: int = wire("shard", uint(SHARDS_PER_SNAPSHOT - 1))


# --- answers to anything ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BusyReply(Message):
    """Not now. A larger number than BUSY_RETRY_MAX_S is malformed: nobody can park a peer."""

    KIND = Kind.BUSY
    retry_after_s: float = wire("retry_after", number(0, BUSY_RETRY_MAX_S))


@dataclass(frozen=True, kw_only=True)
class ErrorReply(Message):
    KIND = Kind.ERROR
    code: int = wire("code", uint(65535))
    reason: str = wire("reason", text(TEXT_MAX_BYTES), "")


# What a request is for where it does not say so itself.
_PURPOSE_OF_KIND = {
    Kind.PEERS_REQUEST: Purpose.RECORD,
    Kind.ANNOUNCE: Purpose.RECORD,
    Kind.VOTE_REQUEST: Purpose.VOTE,
}


def purpose_of(request: Message) -> tuple[int, int]:
    """Purpose and block under which both sides book an exchange."""
    block = int(getattr(request, "block", BLOCK_NONE))
    default = _PURPOSE_OF_KIND.get(request.KIND, Purpose.CONTROL)
    return int(getattr(request, "purpose", default)), block


def decode(head: Head) -> Message:
    """The message of a frame's head. Raises `Malformed` if it breaks its schema."""
    if head.kind not in _BY_KIND:
        raise frames.UnknownKind(head.kind)
    return from_map(_BY_KIND[head.kind], unpack_map(head.header, HEADER_MAX_BYTES))


def expect(message: Message, wanted: type[M]) -> M:
    """The answer, or what the peer said instead: `Busy`, `Refused`, `Malformed`."""
    if isinstance(message, BusyReply):
        raise frames.Busy(message.retry_after_s)
    if isinstance(message, ErrorReply):
        raise frames.Refused(message.code, message.reason)
    if not isinstance(message, wanted):
        raise Malformed(f"expected {wanted.__name__}, the peer sent {type(message).__name__}")
    return message


async def send(channel: Channel, message: Message, payload: BytesLike | Chunks = b"") -> bytes:
    """Send a message; returns the payload's digest (b"" if there is none)."""
    return await channel.send(message.KIND, message.to_header(), payload)


async def receive(
    channel: Channel, wanted: type[M], max_payload_bytes: int | None = None
) -> tuple[M, Head]:
    """The answer to a request. Its payload, if any, is still on the stream."""
    head = await channel.receive_head(max_payload_bytes)
    return expect(decode(head), wanted), head


def error_reply(error: Exception) -> ErrorReply:
    """What to tell a peer whose request failed. A fault of ours is not described to strangers."""
    codes: list[tuple[type[Exception], ErrorCode]] = [
        (frames.VersionMismatch, ErrorCode.VERSION),
        (frames.UnknownKind, ErrorCode.UNKNOWN_KIND),
        (frames.Oversize, ErrorCode.OVERSIZE),
        (frames.DigestMismatch, ErrorCode.DIGEST),
        (frames.Stalled, ErrorCode.TOO_SLOW),
        (Malformed, ErrorCode.MALFORMED),
        (RecordError, ErrorCode.NOT_ALLOWED),  # expired, forged: the stream itself is fine
    ]
    for error_type, code in codes:
        if isinstance(error, error_type):
            reason = "".join(c for c in str(error) if c.isascii() and c.isprintable())
            return ErrorReply(code=code, reason=reason[:TEXT_MAX_BYTES])
    if isinstance(error, WireError):  # well-formed, but no vote or record that we accept
        return ErrorReply(code=ErrorCode.NOT_ALLOWED, reason="refused")
    return ErrorReply(code=ErrorCode.INTERNAL, reason="internal error")
