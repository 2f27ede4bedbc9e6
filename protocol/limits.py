"""All limits on what other peers send, each with its reason, and the kinds of frames.

A number here is part of the protocol: `SPEC.md` repeats it, and refusing what was accepted before
needs a new minor version at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

KIB = 1024
MIB = 1024 * KIB

# --- digests and keys -------------------------------------------------------------------------

DIGEST_BYTES = 32  # BLAKE3-256: names content, so it must resist collisions, not only accidents
SIGNATURE_BYTES = 64  # Ed25519
PEER_ID_BYTES = 38  # identity multihash around a 36-byte libp2p public key
DHT_KEY_BYTES = 20  # hivemind's DHTID is SHA-1

# --- records in the DHT -----------------------------------------------------------------------

# A record travels in every lookup of its block, times the replicas, times the lookups per round.
RECORD_MAX_BYTES = 512
# A peer that vanished without a word is forgotten after this; a live one renews every round.
RECORD_LIFE_MAX_S = 900.0
# hivemind refuses a bootstrap peer whose clock is more than 3 s off; ours is wider, so that a
# reader whose own clock drifted does not lose every peer at once.
CLOCK_SKEW_S = 10.0
# 4 keys per block: a lookup of all of them is one parallel call, and no single storing node
# decides alone who is visible.
BUCKETS_PER_BLOCK = 4
# 128 x (512 + about 60) bytes = 73 KB per reply, far below p2pd's 4 MiB for a unary answer.
RECORDS_PER_KEY = 128
# What a storing node keeps in all: 1024 x 73 KB = 75 MB at the very worst.
KEYS_PER_NODE = 1024
# Records parsed in one lookup (about 20 us each), and signatures checked in it (about 110 us each:
# 55 ms).
RECORDS_CONSIDERED = 2048
SIGNATURES_PER_LOOKUP = 512
ADDRESSES_PER_RECORD = 4
ADDRESS_MAX_BYTES = 160  # a relayed IPv6 address with the relay's peer id is about 130
LABEL_MAX_BYTES = 63  # between two dots of a host name: DNS's own limit
# Peers seen in this many rounds are preferred: new identities are free, staying for rounds is not.
SEEN_ROUNDS = 3

# --- numbers inside messages ------------------------------------------------------------------

BLOCK_NONE = 0xFFFF  # "no block in particular": seeds, assemblers, whole-run requests
BLOCK_MAX = 4095
ROUND_MAX = 2**40  # where a round may be genesis (-1), round + 1 is sent
PROPOSAL_MAX_MS = 3_600_000  # a deadline of an hour is longer than any round's
SEQUENCE_MAX = 2**53 - 1  # exact in a float64, for implementations whose numbers are floats
SIZE_MAX_BYTES = 2**40  # no content of this protocol is a terabyte
CE_MAX_NATS = 1000.0  # per byte; guessing is 5.5
TIME_MAX_S = 1e11  # the year 5138: rejects milliseconds and nonsense
IP_MAX_BYTES = 45  # an IPv6 address with an IPv4 one at its end, the longest form
TEXT_MAX_BYTES = 256  # a reason for a person: one line, never a page
MAP_MAX_FIELDS = 48  # known fields are under 16; the rest is room for newer minor versions
# Items of a list in a map; known lists have at most 64. Nested 1024 deep, msgpack's maximum, lists
# of this length take 1 MiB before the first item is read.
LIST_MAX_ITEMS = 128
NORM_MAX = 2**53 - 1  # in quanta of 2^-24; 2^31 weights at their limit have a norm of 2^46.5
SCALE_MAX = 1 << 16  # the factor that an update was applied with, in 1/65536
SCORE_MAX = 1 << 20  # a cosine in 1/1024 is at most 2^10; the rest is room for other rules

# --- lists inside messages --------------------------------------------------------------------

LISTED_PER_VOTE = 16  # replicas of a block that exchange with each other
LISTED_BYTES = DIGEST_BYTES + PEER_ID_BYTES  # an update and its sender
DECLINED_PER_VOTE = 16  # senders that a voter does not accept, each with its reason
DECLINED_BYTES = PEER_ID_BYTES + 1
# Signature, map, updates, reasons.
VOTE_BLOB_MAX_BYTES = (
    384 + LISTED_PER_VOTE * (LISTED_BYTES + 2) + DECLINED_PER_VOTE * (DECLINED_BYTES + 2)
)
VOTES_PER_REPLY = 64
ROW_MAX_COLUMNS = 16  # of a list in a payload; known rows have at most 6
RECORDS_PER_REPLY = 512
RECORD_ROW_BYTES = 1024  # a record in a list: 589 bytes, and room for newer columns
RECORDS_PER_ANNOUNCE = 16  # the answering peer's own and a few more: enough for a newcomer to begin
LOG_ENTRIES_PER_REPLY = 256  # several pinned snapshots back: more is not needed to catch up
CONTRIBUTIONS_PER_ENTRY = 64
WORK_ONE = 256  # in a log entry: the work of a host with an update of median size
WORK_MAX = WORK_ONE * CONTRIBUTIONS_PER_ENTRY
CONTRIBUTION_BYTES = DIGEST_BYTES + PEER_ID_BYTES + 4 + 4  # update, sender, scale, score
UPDATES_PER_ENTRY = CONTRIBUTIONS_PER_ENTRY
PINS_PER_LOG = 4  # replicas keep two snapshots
PIN_BYTES = 8 + 2 * DIGEST_BYTES  # round + 1, entry, snapshot
SHARDS_PER_SNAPSHOT = 8192  # x 8 MiB = 64 GiB, more than one block can be
SHARD_BYTES = 8 * MIB  # small enough to retry, large enough that the header does not matter
BLOCKS_PER_HELLO = 64

# --- frames -----------------------------------------------------------------------------------

HEADER_MAX_BYTES = 8 * KIB
CHUNK_BYTES = 256 * KIB  # p2pd was fastest with this; it also bounds memory per transfer
EXCHANGES_PER_STREAM = 64

# --- time and concurrency (defaults; a call may be stricter) ------------------------------------

STALL_S = 10.0  # without a byte for this long the peer counts as gone
RESTS_S = 60.0  # a kept stream without a request for this long is closed
CONTROL_DEADLINE_S = 15.0  # a whole exchange without a bulk payload
BULK_DEADLINE_S = 600.0  # the ceiling for a bulk transfer; rounds set a shorter one
# A bulk answer may take the grace plus its size divided by the least rate. After that, if all
# places are taken, the next request gets its place: a peer that reads slowly on purpose blocks
# nobody, and one with a slow line goes on while there is room.
BULK_GRACE_S = 10.0
BULK_LEAST_BYTES_PER_S = 64 * KIB
# Aggregates and shards sent at once; beyond that: `busy`. 8 x 256 KiB chunks both ways stay small.
CONCURRENT_TRANSFERS = 8
TRANSFERS_PER_PEER = 2  # newcomers ask a donor for one thing at a time
# Updates have places of their own, since a round has a deadline: 15 replicas pull ours at the same
# moment, and some of them also the updates of others that they miss.
UPDATE_TRANSFERS = 24
UPDATES_PER_PEER = 3
STREAMS_PER_PEER = 4  # one peer must not take all of the places
BUSY_RETRY_MAX_S = 120.0  # a peer cannot park us longer than this by saying `busy`

# --- serving (kinds 64..71) -----------------------------------------------------------------------

SWEEP_ID_BYTES = 16  # random: nobody guesses another client's sweep or session
SWEEP_HOPS_MAX = 32  # blocks of a route; 32 x 157 bytes fit into a header
SWEEP_PEERS_PER_HOP = 3  # the chosen host, and two to fall back on
SWEEP_DRAFTS_MAX = 32
SWEEP_PARTS_MAX = 16  # of one sweep: each has a header of its own
SWEEP_CONTEXT_MAX = 16384  # bytes of text in one sweep; a run's context may be smaller
SWEEP_WEIGHT_MAX = 1e6
SWEEP_VERSIONS_PER_REPLY = 64
SWEEP_HOP_MAX_S = 12.0  # below CONTROL_DEADLINE_S, in which every exchange must end
SWEEP_BUDGET_MAX_S = 120.0  # the longest that a client may wait for a sweep

# --- ledger -------------------------------------------------------------------------------------

LEDGER_PEERS = 256  # named peers; the smallest of the others are folded into one entry
LEDGER_CELLS_PER_PEER = 256  # (purpose, block) pairs of one peer


class Kind(IntEnum):
    """Kind of a frame. 64 to 95 are reserved for serving, 128 and above for experiments."""

    HELLO = 1
    HELLO_REPLY = 2
    RUN_REQUEST = 3
    RUN_REPLY = 4
    PEERS_REQUEST = 5
    PEERS_REPLY = 6
    UPDATE_REQUEST = 7
    UPDATE_REPLY = 8
    VOTE_REQUEST = 9
    VOTE_REPLY = 10
    INDEX_REQUEST = 11
    INDEX_REPLY = 12
    SHARD_REQUEST = 13
    SHARD_REPLY = 14
    AGGREGATE_REQUEST = 15
    AGGREGATE_REPLY = 16
    LOG_REQUEST = 17
    LOG_REPLY = 18
    PING = 19
    PONG = 20
    ANNOUNCE = 21
    ANNOUNCE_REPLY = 22
    DIAL_BACK = 23
    DIAL_BACK_REPLY = 24
    SERVING_REQUEST = 64
    SERVING_REPLY = 65
    SWEEP = 66
    SWEEP_TAKEN = 67
    SWEEP_WAIT = 68
    SWEEP_HANDED = 69
    SWEEP_RESULT = 70
    SWEEP_FAILED = 71
    BUSY = 126
    ERROR = 127


# Kinds without an entry carry no payload at all.
PAYLOAD_MAX_BYTES: dict[Kind, int] = {
    Kind.RUN_REPLY: 64 * KIB,
    Kind.PEERS_REPLY: RECORDS_PER_REPLY * RECORD_ROW_BYTES,
    Kind.UPDATE_REPLY: 512 * MIB,
    Kind.VOTE_REPLY: 512 * KIB,
    Kind.INDEX_REPLY: SHARDS_PER_SNAPSHOT * DIGEST_BYTES,
    Kind.SHARD_REPLY: SHARD_BYTES,
    Kind.AGGREGATE_REPLY: 512 * MIB,
    Kind.LOG_REPLY: 2 * MIB,  # 256 entries of at most 5,200 bytes
    Kind.ANNOUNCE_REPLY: RECORDS_PER_ANNOUNCE * RECORD_ROW_BYTES,
    Kind.SWEEP: 64 * MIB,  # hidden states of all drafts; a host admits what its memory allows
    Kind.SWEEP_RESULT: 32 * MIB,
}


@dataclass(frozen=True)
class KindLimit:
    """Largest header and payload of one kind of frame."""

    header_bytes: int
    payload_bytes: int


KIND_LIMITS: dict[int, KindLimit] = {
    kind: KindLimit(HEADER_MAX_BYTES, PAYLOAD_MAX_BYTES.get(kind, 0)) for kind in Kind
}
