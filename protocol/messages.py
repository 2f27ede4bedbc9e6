"""All messages: each a frozen dataclass with its kind of frame and the schema of its header.

A request is one frame, its answer one frame; `BusyReply` and `ErrorReply` may answer any request.
`wire(...)` gives a field's name on the wire. The forms of payloads are in `payloads.py`, `log.py`,
`votes.py`, `updates.py` and the tensor codecs.
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

# All message classes that have been imported: those below, and those of `serving.py`.
_BY_KIND: dict[Kind, type[Message]] = {}


class Purpose(IntEnum):
    """What bytes are sent for, for the ledger. Part of a request, so that both sides agree."""

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
    """Result of dialling a peer back. Unknown values of newer versions stay plain numbers."""

    NOT_TRIED = 0  # no address that may be dialled: over a relay, or of the answering machine
    REACHED = 1  # a libp2p node answers there
    REFUSED = 2  # the machine is there, nothing listens on the port
    TIMED_OUT = 3  # no answer at all
    UNREACHABLE = 4  # no route to that address from here
    NOT_LIBP2P = 5  # something else listens there


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages. `to_header` encodes one, `decode` reads it."""

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
    """Ask who the peer is and which run it is part of. `run` may be empty: any run."""

    KIND = Kind.HELLO
    run: bytes = wire("run", digest_or_empty(), b"")
    agent: str = wire("agent", text(64), "")


@dataclass(frozen=True, kw_only=True)
class HelloReply(Message):
    """`now_s` is the peer's clock (Unix time), used for the median offset of the rounds' clock.

    `ce_nats` is the CE of its block's consensus on the peer's own held-out bytes, `own_ce_nats`
    that of its running weights; 0: not measured.
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
    """Ask for the run file with this digest."""

    KIND = Kind.RUN_REQUEST
    run: bytes = wire("run", digest())


@dataclass(frozen=True, kw_only=True)
class RunReply(Message):
    """Payload: the run file, whose content digest is `run`."""

    KIND = Kind.RUN_REPLY
    run: bytes = wire("run", digest())


@dataclass(frozen=True, kw_only=True)
class PeersRequest(Message):
    """Ask for the known records of a block's peers, or (`block` = BLOCK_NONE) of all peers."""

    KIND = Kind.PEERS_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    cap: int = wire("cap", uint(RECORDS_PER_REPLY, 1), RECORDS_PER_REPLY)


@dataclass(frozen=True, kw_only=True)
class PeersReply(Message):
    """Payload: `pack_records`. The receiver verifies the signatures itself."""

    KIND = Kind.PEERS_REPLY
    count: int = wire("count", uint(RECORDS_PER_REPLY))


@dataclass(frozen=True, kw_only=True)
class Announce(Message):
    """A peer's signed record of a block (`payloads.announce_of`, `record_of`), sent directly.

    Through the DHT it would take seconds.
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
    """Payload: `pack_records`, the answering peer's own record of the block (if any) first."""

    KIND = Kind.ANNOUNCE_REPLY
    count: int = wire("count", uint(RECORDS_PER_ANNOUNCE))


@dataclass(frozen=True, kw_only=True)
class Ping(Message):
    KIND = Kind.PING
    nonce: bytes = wire("nonce", blob(0, 16), b"")


@dataclass(frozen=True, kw_only=True)
class Pong(Message):
    """`now_s` as in `HelloReply`; `transfers` is the number of transfers in progress."""

    KIND = Kind.PONG
    nonce: bytes = wire("nonce", blob(0, 16), b"")
    now_s: float = wire("now", number(0, TIME_MAX_S))
    transfers: int = wire("transfers", uint(65535), 0)


@dataclass(frozen=True, kw_only=True)
class DialBack(Message):
    """Ask the peer to open a new connection to this port at the IP that it sees us at.

    Without a field for an address no peer can be made to dial a third party.
    """

    KIND = Kind.DIAL_BACK
    run: bytes = wire("run", digest())
    port: int = wire("port", uint(65535, 1))


@dataclass(frozen=True, kw_only=True)
class DialBackReply(Message):
    """`outcome` is a `DialOutcome`; `observed` the asker's IP, empty over a relay."""

    KIND = Kind.DIAL_BACK_REPLY
    outcome: int = wire("outcome", uint(255))
    observed: str = wire("observed", text(IP_MAX_BYTES), "")


# --- a round ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UpdateRequest(Message):
    """Ask for the update with this digest, the peer's own or another replica's that it holds."""

    KIND = Kind.UPDATE_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    round: int = wire("round", uint(ROUND_MAX))
    digest: bytes = wire("digest", digest())
    purpose: int = wire("purpose", uint(255), int(Purpose.UPDATE))


@dataclass(frozen=True, kw_only=True)
class UpdateReply(Message):
    """Payload: the encoded update, with the content digest that was asked for."""

    KIND = Kind.UPDATE_REPLY
    block: int = wire("block", block_id)
    round: int = wire("round", uint(ROUND_MAX))


@dataclass(frozen=True, kw_only=True)
class VoteRequest(Message):
    """Send our vote (the blob of `seal_vote`; may be empty) and ask for those the peer holds."""

    KIND = Kind.VOTE_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    round: int = wire("round", uint(ROUND_MAX))
    vote: bytes = wire("vote", blob(0, VOTE_BLOB_MAX_BYTES), b"")


@dataclass(frozen=True, kw_only=True)
class VoteReply(Message):
    """Payload: `pack_votes` of that block and round, the answering peer's own vote first."""

    KIND = Kind.VOTE_REPLY
    count: int = wire("count", uint(VOTES_PER_REPLY))


# --- the consensus log --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LogRequest(Message):
    """Ask for the head of a block's log and the entries before it.

    `since` is the digest of the asker's head; empty: from the oldest entry kept.
    """

    KIND = Kind.LOG_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    since: bytes = wire("since", digest_or_empty(), b"")
    purpose: int = wire("purpose", uint(255), int(Purpose.CATCH_UP))


@dataclass(frozen=True, kw_only=True)
class LogReply(Message):
    """The head (round, digest), the snapshots (packed `Pin`s) and, as payload, `pack_log`.

    Entries begin with `since` itself if the peer has it, otherwise with its oldest; of more than
    LOG_ENTRIES_PER_REPLY the newest are sent, so that the head is always among them.
    """

    KIND = Kind.LOG_REPLY
    block: int = wire("block", block_id)
    head_round: int = round_or_genesis("round")
    consensus: bytes = wire("consensus", digest())
    count: int = wire("count", uint(LOG_ENTRIES_PER_REPLY))
    pins: tuple[bytes, ...] = wire("pins", list_of(blob(PIN_BYTES, PIN_BYTES), PINS_PER_LOG), ())


@dataclass(frozen=True, kw_only=True)
class AggregateRequest(Message):
    """Ask for the updates that were applied in a log entry."""

    KIND = Kind.AGGREGATE_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    round: int = round_or_genesis("round")
    digest: bytes = wire("digest", digest())
    purpose: int = wire("purpose", uint(255), int(Purpose.CATCH_UP))


@dataclass(frozen=True, kw_only=True)
class AggregateReply(Message):
    """Payload: `pack_updates` of the contributions with a scale above 0, in the entry's order."""

    KIND = Kind.AGGREGATE_REPLY
    block: int = wire("block", block_id)
    round: int = round_or_genesis("round")


@dataclass(frozen=True, kw_only=True)
class IndexRequest(Message):
    """Ask for the index of the snapshot with this digest."""

    KIND = Kind.INDEX_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    digest: bytes = wire("digest", digest())
    purpose: int = wire("purpose", uint(255), int(Purpose.CATCH_UP))


@dataclass(frozen=True, kw_only=True)
class IndexReply(Message):
    """Payload: the digests of the shards, one after the other.

    The content digest of this payload is the snapshot's name, so a false index is noticed before
    the first shard is fetched.
    """

    KIND = Kind.INDEX_REPLY
    size_bytes: int = wire("size", uint(SIZE_MAX_BYTES, 1))
    shards: int = wire("shards", uint(SHARDS_PER_SNAPSHOT, 1))


@dataclass(frozen=True, kw_only=True)
class ShardRequest(Message):
    """Ask for shard number `shard` of the snapshot `digest`."""

    KIND = Kind.SHARD_REQUEST
    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    digest: bytes = wire("digest", digest())
    shard: int = wire("shard", uint(SHARDS_PER_SNAPSHOT - 1))
    purpose: int = wire("purpose", uint(255), int(Purpose.CATCH_UP))


@dataclass(frozen=True, kw_only=True)
class ShardReply(Message):
    """Payload: the bytes of the shard, with the content digest that the index has for it."""

    KIND = Kind.SHARD_REPLY
    shard: int = wire("shard", uint(SHARDS_PER_SNAPSHOT - 1))


# --- answers to anything ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BusyReply(Message):
    """No place now; try again later. More than BUSY_RETRY_MAX_S is malformed, so that no peer can
    make us wait for long."""

    KIND = Kind.BUSY
    retry_after_s: float = wire("retry_after", number(0, BUSY_RETRY_MAX_S))


@dataclass(frozen=True, kw_only=True)
class ErrorReply(Message):
    KIND = Kind.ERROR
    code: int = wire("code", uint(65535))
    reason: str = wire("reason", text(TEXT_MAX_BYTES), "")


# Purposes of requests that have no field for it.
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


def decode_message(head: Head) -> Message:
    """The message of a frame's head. Raises `Malformed` if it breaks its schema."""
    if head.kind not in _BY_KIND:
        raise frames.UnknownKind(head.kind)
    return from_map(_BY_KIND[head.kind], unpack_map(head.header, HEADER_MAX_BYTES))


def expect(message: Message, wanted: type[M]) -> M:
    """The message, if it is of the wanted type; otherwise raises `Busy`, `Refused`, `Malformed`."""
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
    return expect(decode_message(head), wanted), head


def error_reply(error: Exception) -> ErrorReply:
    """The reply to a request that failed. Internal errors are not described to other peers."""
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
    if isinstance(error, WireError):  # well-formed, but not acceptable
        return ErrorReply(code=ErrorCode.NOT_ALLOWED, reason="refused")
    return ErrorReply(code=ErrorCode.INTERNAL, reason="internal error")
