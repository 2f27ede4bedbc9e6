"""Encoding and decoding of a run's updates, replay of log entries from them, shards of snapshots.

Rounds from the codec's units of 2^-40 to the consensus's of 2^-24. An update's header is
`protocol.updates`'s.

Known limit: `replay` works for the aggregation rules that take a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from protocol.codec import FIXED_BITS, CodecSpec, Source, decode_fixed, encode, read_header
from protocol.digests import weights_digest
from protocol.errors import WireError
from protocol.frames import content_digest
from protocol.identity import peer_from_text
from protocol.limits import SHARD_BYTES, WORK_ONE
from protocol.log import Entry, LogError
from protocol.packing import Malformed
from protocol.payloads import pack_index
from protocol.updates import (
    UPDATE_HEADER_BYTES,
    UpdateError,
    pack_update,
    update_body,
    update_digest,
)
from swarm.consensus.fixed_point import (
    QUANTUM_BITS,
    SCALE_ONE,
    SEGMENT,
    VALUE_LIMIT,
    FixedUpdate,
    Ints,
    checked,
    scaled,
)
from swarm.consensus.schedule import CodecSchedule
from swarm.consensus.sums import apply_step, mean_step, summed

Floats = npt.NDArray[np.float32]
Quanta = npt.NDArray[np.int32]

_SHIFT = FIXED_BITS - QUANTUM_BITS


class UpdateOversize(UpdateError):
    """More bytes than an honest update of this run can have."""


class OtherCodec(UpdateError):
    """An update in another codec than the run's."""


# --- updates


@dataclass(frozen=True)
class UpdateCodec:
    """The codec of a run's updates, for a block of `size` weights."""

    run_codec: CodecSchedule | CodecSpec | str
    size: int

    @cached_property
    def schedule(self) -> CodecSchedule:
        given = self.run_codec
        return given if isinstance(given, CodecSchedule) else CodecSchedule.always(given)

    def spec_at(self, round_: int) -> CodecSpec:
        return self.schedule.at(round_)

    def max_bytes_at(self, round_: int) -> int:
        """Upper bound of an honest update's bytes in a round, with its header."""
        return UPDATE_HEADER_BYTES + self.spec_at(round_).max_bytes(self.size)

    def encode(
        self, rest: Ints | Floats | Source, block: int, round_: int, sender: bytes
    ) -> tuple[bytes, FixedUpdate]:
        """The payload of an update, and the update exactly as every receiver decodes it.

        `rest`: what is to be sent, as float weights, a `Source` of them, or integers in quanta.
        """
        vector = _as_floats(rest) if isinstance(rest, np.ndarray) else rest
        encoded = encode(vector, self.spec_at(round_))
        payload = pack_update(block, round_, sender, encoded.data)
        if encoded.sparse is None:
            return payload, self.decode(payload, block, round_, sender)
        values = encoded.sparse.coded.values(_coarser)
        return payload, FixedUpdate(self.size, encoded.sparse.indices, values)

    def decode(self, payload: bytes, block: int, round_: int, sender: bytes) -> FixedUpdate:
        """The update that `sender` made for this block and round. Raises a WireError."""
        spec, most = self.spec_at(round_), self.max_bytes_at(round_)
        if len(payload) > most:
            raise UpdateOversize(f"update of {len(payload)} bytes, the limit is {most}")
        body = update_body(payload, block, round_, sender)
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
    """From units of 2^-40 to units of 2^-24: halves away from zero, clipped to int32."""
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
    """The consensus after `entry` and its step, from the updates that were included in it.

    The same bits as `aggregate` and `apply_step` gave on the replicas: their decisions (clipped,
    left out) are the scales in the entry, the rest is integer arithmetic. Raises LogError if the
    result does not have the entry's digests.
    """
    new, step = apply_step(consensus, _mean_of(entry, payloads, codec, block))
    if step.digest != entry.step:
        raise LogError(f"the updates of round {entry.round} do not give its step")
    if weights_digest(new) != entry.weights:
        raise LogError(f"the step of round {entry.round} does not give its consensus")
    return new, step


def replayed_step(
    entry: Entry, payloads: Sequence[bytes], codec: UpdateCodec, block: int
) -> FixedUpdate | None:
    """The step of an entry from its updates alone, without the weights.

    None if a weight was clamped to its range in that step.
    """
    step = _mean_of(entry, payloads, codec, block)
    return step if step.digest == entry.step else None


def _mean_of(
    entry: Entry, payloads: Sequence[bytes], codec: UpdateCodec, block: int
) -> FixedUpdate:
    """The mean of an entry's updates. Raises LogError if the payloads are not its updates."""
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


# --- snapshots


def snapshot_index(consensus: Quanta) -> bytes:
    """The index of a consensus as a snapshot: the digests of its shards."""
    return pack_index([content_digest(shard) for shard in shards_of(consensus)])


def shards_of(consensus: Quanta) -> list[memoryview]:
    """The shards of a snapshot, as views of the array."""
    whole = np.ascontiguousarray(consensus, dtype="<i4").data.cast("B")
    return [whole[at : at + SHARD_BYTES] for at in range(0, len(whole), SHARD_BYTES)]


def from_shards(shards: Sequence[bytes], size: int) -> Quanta:
    """The consensus of a snapshot. The caller checks the shards' digests and compares
    `weights_digest` with the entry's."""
    if sum(map(len, shards)) != 4 * size or any(len(s) != SHARD_BYTES for s in shards[:-1]):
        raise Malformed(f"shards that do not make up a block of {size} weights")
    return np.frombuffer(b"".join(shards), dtype="<i4").astype(np.int32)
