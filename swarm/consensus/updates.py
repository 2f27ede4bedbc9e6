"""Between the round and the wire: updates, votes, log entries and snapshots in both forms.

Decides what an encoded update is (who made it, for which block and round, then the codec's bytes),
the rounding from the codec's grid to the consensus's, and how a follower of the log gets from one
consensus to the next. Knows nothing of peers' addresses, deadlines or files.

An update names its block, round and sender inside the bytes that its digest covers: replayed in a
later round, brought to another block, or handed in by another peer as its own, it is refused.

Known limits: `replay` follows rounds of one group (up to 16 replicas) under the rules that take a
mean. An entry that combines several groups does not say which update was in which group, and is
refused by its step's digest; a follower then takes a snapshot.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from protocol import payloads as wire
from protocol.codec import FIXED_BITS, CodecSpec, Source, decode_fixed, encode, read_header
from protocol.errors import WireError
from protocol.frames import content_digest
from protocol.identity import peer_from_text, peer_text, public_key_of
from protocol.limits import DIGEST_BYTES, PEER_ID_BYTES, SHARD_BYTES, WORK_ONE
from protocol.packing import Malformed
from protocol.payloads import LogEntry, SignedVote, pack_index
from swarm.consensus.fixed_point import (
    QUANTUM_BITS,
    SCALE_ONE,
    SEGMENT,
    VALUE_LIMIT,
    FixedUpdate,
    Ints,
    UpdateError,
    checked,
    scaled,
    step_digest,
    weights_digest,
)
from swarm.consensus.log import Contribution, Entry, LogError
from swarm.consensus.schedule import CodecSchedule
from swarm.consensus.sums import apply_step, mean_step, summed
from swarm.consensus.votes import Reason, UpdateRef, Vote, checked_vote

Floats = npt.NDArray[np.float32]
Quanta = npt.NDArray[np.int32]

_HEADER = struct.Struct(f">HQ{PEER_ID_BYTES}s")  # block, round, sender
_SHIFT = FIXED_BITS - QUANTUM_BITS


class WrongBlock(UpdateError):
    """An update of another block."""


class WrongRound(UpdateError):
    """An update of another round: a replay, or a clock that is off."""


class WrongSender(UpdateError):
    """An update that another peer made."""


class UpdateOversize(UpdateError):
    """More bytes than an honest update of this run can have."""


class OtherCodec(UpdateError):
    """An update in another codec than the run's."""


# --- updates


def update_digest(payload: bytes) -> bytes:
    """The name of an update."""
    return content_digest(payload)


@dataclass(frozen=True)
class UpdateCodec:
    """How the updates of a run are encoded, for a block of `size` weights."""

    run_codec: CodecSchedule | CodecSpec | str
    size: int

    @cached_property
    def schedule(self) -> CodecSchedule:
        given = self.run_codec
        return given if isinstance(given, CodecSchedule) else CodecSchedule.always(given)

    def spec_at(self, round_: int) -> CodecSpec:
        return self.schedule.at(round_)

    def max_bytes_at(self, round_: int) -> int:
        """What an honest update of a round has at most, with its header."""
        return _HEADER.size + self.spec_at(round_).max_bytes(self.size)

    def encode(
        self, rest: Ints | Floats | Source, block: int, round_: int, sender: bytes
    ) -> tuple[bytes, FixedUpdate]:
        """The payload of an update, and the update exactly as every receiver will decode it.

        `rest` is what is to be sent, as weights (also as a source of them) or, integers, in quanta.
        """
        vector = _as_floats(rest) if isinstance(rest, np.ndarray) else rest
        encoded = encode(vector, self.spec_at(round_))
        payload = _HEADER.pack(block, round_, sender) + encoded.data
        if encoded.sparse is None:
            return payload, self.decode(payload, block, round_, sender)
        values = encoded.sparse.coded.values(_coarser)
        return payload, FixedUpdate(self.size, encoded.sparse.indices, values)

    def decode(self, payload: bytes, block: int, round_: int, sender: bytes) -> FixedUpdate:
        """The update that `sender` made for this block and round; otherwise a typed WireError."""
        spec, most = self.spec_at(round_), self.max_bytes_at(round_)
        if len(payload) > most:
            raise UpdateOversize(f"update of {len(payload)} bytes, the limit is {most}")
        if len(payload) < _HEADER.size:
            raise Malformed("too short for an update")
        named_block, named_round, named_sender = _HEADER.unpack_from(payload)
        if named_block != block:
            raise WrongBlock(f"update of block {named_block}, not of block {block}")
        if named_round != round_:
            raise WrongRound(f"update of round {named_round}, not of round {round_}")
        if named_sender != sender:
            raise WrongSender("update that another peer made")
        body = payload[_HEADER.size :]
        header = read_header(body, self.size)
        if (header.codec, header.block) != (spec.codec, spec.block):
            raise OtherCodec(f"update in {header.codec.name}, the run's codec is {spec}")
        indices, values = decode_fixed(body, self.size, spec.max_kept(self.size), _coarser)
        return checked(FixedUpdate(self.size, indices, values), self.size)


def _as_floats(rest: Ints | Floats) -> Floats:
    if rest.dtype == np.float32:
        return rest.astype(np.float32, copy=False)
    values = np.empty(len(rest), dtype=np.float32)
    for start in range(0, len(rest), SEGMENT):
        part = rest[start : start + SEGMENT].astype(np.float64)
        part *= 2.0**-QUANTUM_BITS
        values[start : start + SEGMENT] = part
    return values


def _coarser(fixed: Ints) -> Quanta:
    """Quanta of 2^-40 to quanta of 2^-24: halves away from zero, clipped to what int32 holds."""
    values = np.empty(len(fixed), dtype=np.int32)
    for start in range(0, len(fixed), SEGMENT):
        part = fixed[start : start + SEGMENT]
        out = np.abs(part)
        out += 1 << (_SHIFT - 1)
        out >>= _SHIFT
        np.minimum(out, VALUE_LIMIT - 1, out=out)
        sign = part >> 63  # -1 of what is negative, else 0
        out ^= sign
        out -= sign
        values[start : start + SEGMENT] = out
    return values


# --- following the log


def replay(
    consensus: Quanta, entry: Entry, payloads: Sequence[bytes], codec: UpdateCodec, block: int
) -> tuple[Quanta, FixedUpdate]:
    """The consensus after `entry` and the step to it, from the updates that went into it.

    The same bits as `aggregate` and `apply_step` gave on the replicas: what they judged (clips, who
    was left out) stands in the entry as scales, the rest is integer arithmetic. LogError otherwise.
    """
    new, step = apply_step(consensus, _mean_of(entry, payloads, codec, block))
    if step_digest(step) != entry.step:
        raise LogError(f"the updates of round {entry.round} do not give its step")
    if weights_digest(new) != entry.weights:
        raise LogError(f"the step of round {entry.round} does not give its consensus")
    return new, step


def replayed_step(
    entry: Entry, payloads: Sequence[bytes], codec: UpdateCodec, block: int
) -> FixedUpdate | None:
    """The step of an entry from its updates alone; None if that does not give it.

    It does, but for a weight that was stopped at the edge of its range.
    """
    step = _mean_of(entry, payloads, codec, block)
    return step if step_digest(step) == entry.step else None


def _mean_of(
    entry: Entry, payloads: Sequence[bytes], codec: UpdateCodec, block: int
) -> FixedUpdate:
    """What an entry's updates come to. LogError if they are not its updates."""
    included = [c for c in entry.contributions if c.scale > 0]
    if [update_digest(payload) for payload in payloads] != [c.digest for c in included]:
        raise LogError(f"not the updates that went into round {entry.round}")
    if any(c.scale > SCALE_ONE for c in included):
        raise LogError(f"an update counts more than once in round {entry.round}")
    nothing = np.zeros(0, dtype=np.int64)
    parts = [(FixedUpdate(codec.size, nothing, nothing), 1)]
    try:
        for part, payload in zip(included, payloads, strict=True):
            update = codec.decode(payload, block, entry.round, peer_from_text(part.sender))
            parts.append((scaled(update, part.scale), 1))
    except WireError as error:
        raise LogError(f"round {entry.round} includes no valid update: {error}") from error
    if included and not WORK_ONE <= entry.work <= WORK_ONE * len(included):
        raise LogError(f"the updates of round {entry.round} come to the work of nobody")
    return mean_step(summed(parts), max(entry.work, WORK_ONE))


def to_wire_entry(entry: Entry) -> LogEntry:
    parts = [(c.digest, peer_from_text(c.sender), c.scale, c.score) for c in entry.contributions]
    return LogEntry(
        round=entry.round + 1,
        parent=entry.parent,
        weights=entry.weights,
        step=entry.step,
        median_norm=entry.median_norm,
        work=entry.work,
        contributions=tuple(parts),
    )


def from_wire_entry(entry: LogEntry) -> Entry:
    """The entry; its digest says whether it is the one that was meant."""
    parts = [
        Contribution(digest, _peer_text(sender), scale, score)
        for digest, sender, scale, score in entry.contributions
    ]
    return Entry(
        round=entry.round - 1,
        parent=entry.parent,
        weights=entry.weights,
        step=entry.step,
        median_norm=entry.median_norm,
        contributions=tuple(parts),
        work=entry.work,
    )


@lru_cache(maxsize=1024)
def _peer_text(peer_id: bytes) -> str:
    public_key_of(peer_id)  # two texts for one peer would be two senders
    return peer_text(peer_id)


# --- votes


def to_wire_vote(vote: Vote, run: bytes, block: int) -> wire.Vote:
    """What is signed and sent. The voter is not in it: the signature's owner is the voter."""
    return wire.Vote(
        run=run,
        block=block,
        round=vote.round,
        consensus=vote.base,
        base_round=vote.base_round + 1,
        listed=tuple(ref.digest + peer_from_text(ref.sender) for ref in vote.listed),
        declined=tuple(peer_from_text(peer) + bytes([why]) for peer, why in vote.declined),
    )


def from_wire_vote(signed: SignedVote) -> Vote:
    """The vote as rounds count it. Raises VoteError or Malformed. Run and block are the caller's
    to compare."""
    vote = signed.vote
    listed = [
        UpdateRef(item[:DIGEST_BYTES], _peer_text(item[DIGEST_BYTES:])) for item in vote.listed
    ]
    return checked_vote(
        Vote(
            peer_text(signed.voter),
            vote.round,
            vote.consensus,
            vote.base_round - 1,
            tuple(listed),
            tuple((_peer_text(item[:-1]), _reason(item[-1])) for item in vote.declined),
        )
    )


def _reason(code: int) -> Reason:
    return Reason(code) if code <= max(Reason) else Reason.OTHER


# --- snapshots


def snapshot_index(consensus: Quanta) -> bytes:
    """The index of a consensus as a snapshot: the names of its shards."""
    return pack_index([content_digest(shard) for shard in shards_of(consensus)])


def shards_of(consensus: Quanta) -> list[memoryview]:
    """The shards of a snapshot, as views on the array (no copy)."""
    whole = np.ascontiguousarray(consensus, dtype="<i4").data.cast("B")
    return [whole[at : at + SHARD_BYTES] for at in range(0, len(whole), SHARD_BYTES)]


def from_shards(shards: Sequence[bytes], size: int) -> Quanta:
    """The consensus of a snapshot. The caller has checked the shards' digests, and compares
    `weights_digest` with the entry's."""
    if sum(map(len, shards)) != 4 * size or any(len(s) != SHARD_BYTES for s in shards[:-1]):
        raise Malformed(f"shards that do not make up a block of {size} weights")
    return np.frombuffer(b"".join(shards), dtype="<i4").astype(np.int32)
