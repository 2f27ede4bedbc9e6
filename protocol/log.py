"""Entries of a block's consensus log: their digests and their form on the wire.

An entry's digest covers its parent, so the digest in a peer's signed record stands for the whole
history: weights, steps, contributors and scores. Reading a log is `swarm.consensus.log`'s part.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from protocol.errors import WireError
from protocol.frames import BytesLike
from protocol.identity import known_text, peer_from_text
from protocol.limits import (
    CONTRIBUTION_BYTES,
    CONTRIBUTIONS_PER_ENTRY,
    DIGEST_BYTES,
    LOG_ENTRIES_PER_REPLY,
    NORM_MAX,
    PAYLOAD_MAX_BYTES,
    PEER_ID_BYTES,
    PIN_BYTES,
    SCALE_MAX,
    SCORE_MAX,
    WORK_MAX,
    Kind,
)
from protocol.packing import (
    Malformed,
    blob,
    bounded,
    digest,
    pack,
    round_received,
    round_sent,
    uint,
    unpack_rows,
)

_CONTRIBUTION = struct.Struct(f">{DIGEST_BYTES}s{PEER_ID_BYTES}sIi")
_PIN = struct.Struct(f">Q{DIGEST_BYTES}s{DIGEST_BYTES}s")
_ROW = (
    digest(),
    digest(),
    digest(),
    uint(NORM_MAX),
    uint(WORK_MAX),
    blob(0, CONTRIBUTIONS_PER_ENTRY * CONTRIBUTION_BYTES),
)


class LogError(WireError):
    """Entries that do not form the chain of the digest that was asked for."""


@dataclass(frozen=True)
class Contribution:
    """One update of an agreed set. `scale`: the factor it was applied with, in 1/65536 (0: left
    out). `score`: its agreement with the other updates, in 1/1024."""

    digest: bytes
    sender: str
    scale: int
    score: int = 0


@dataclass(frozen=True)
class Entry:
    """The consensus after a round. `weights` and `step` are digests.

    `work` is the total work of the included updates, in 1/256 of one host's full round
    (`swarm.consensus.aggregate.work_of`): the step is the sum of the updates divided by it.
    """

    round: int
    parent: bytes
    weights: bytes
    step: bytes
    median_norm: int
    contributions: tuple[Contribution, ...]
    work: int = 0

    @cached_property
    def digest(self) -> bytes:
        state = hashlib.blake2b(b"blockswarm entry 2", digest_size=32)
        number = round_sent(self.round)
        numbers = (number, self.median_norm, self.work, len(self.contributions))
        for part in (self.parent, self.weights, self.step, *map(_int_bytes, numbers)):
            state.update(len(part).to_bytes(4, "big") + part)
        for c in self.contributions:
            for part in (c.digest, c.sender.encode(), _int_bytes(c.scale), _int_bytes(c.score)):
                state.update(len(part).to_bytes(4, "big") + part)
        return state.digest()

    def contribution_of(self, sender: str) -> Contribution | None:
        return next((c for c in self.contributions if c.sender == sender), None)

    @cached_property
    def named(self) -> frozenset[bytes]:
        """The digests of the agreed set's updates."""
        return frozenset(c.digest for c in self.contributions)

    def included(self, digest: bytes) -> bool:
        return any(c.digest == digest and c.scale > 0 for c in self.contributions)


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(16, "big", signed=True)


def genesis(run_id: str, block: int, weights: bytes) -> Entry:
    """The entry before the first round: the weights that follow from the run's seed."""
    root = hashlib.blake2b(f"{run_id}/{block}".encode(), digest_size=32).digest()
    return Entry(-1, root, weights, bytes(32), 0, ())


def pack_log(entries: Sequence[Entry]) -> bytes:
    """Entries as a payload. Raises `Malformed` for what `unpack_log` would refuse."""
    if len(entries) > LOG_ENTRIES_PER_REPLY:
        raise Malformed(f"{len(entries)} log entries, the limit is {LOG_ENTRIES_PER_REPLY}")
    rows = []
    for e in entries:
        if len(e.contributions) > CONTRIBUTIONS_PER_ENTRY:
            raise Malformed(f"a log entry of {len(e.contributions)} contributions")
        parts = b"".join(
            _CONTRIBUTION.pack(c.digest, peer_from_text(c.sender), c.scale, c.score)
            for c in _checked(e.contributions)
        )
        row = (e.parent, e.weights, e.step, e.median_norm, e.work, parts)
        checked = (check(value) for check, value in zip(_ROW, row, strict=True))
        rows.append([round_sent(e.round), *checked])
    return pack(rows)


def unpack_log(payload: BytesLike) -> list[Entry]:
    """Entries of a payload. That they form a chain is checked in `swarm.consensus.log`."""
    limit = bounded(payload, PAYLOAD_MAX_BYTES[Kind.LOG_REPLY])
    rows = unpack_rows(payload, limit, LOG_ENTRIES_PER_REPLY, round_received, *_ROW)
    return [
        Entry(number, parent, weights, step, median_norm, _contributions(parts), work)
        for number, parent, weights, step, median_norm, work, parts in rows
    ]


def _contributions(data: bytes) -> tuple[Contribution, ...]:
    if len(data) % CONTRIBUTION_BYTES:
        raise Malformed("contributions of a log entry that are cut off")
    rows = _CONTRIBUTION.iter_unpack(data)
    return _checked(Contribution(name, known_text(peer), *rest) for name, peer, *rest in rows)


def _checked(parts: Iterable[Contribution]) -> tuple[Contribution, ...]:
    found = tuple(parts)
    for part in found:
        digest()(part.digest)
        uint(SCALE_MAX)(part.scale)
        uint(SCORE_MAX, -SCORE_MAX)(part.score)
    # One order only, so that one consensus has one entry; and each sender counts once.
    if any(one.digest >= next_one.digest for one, next_one in pairwise(found)):
        raise Malformed("contributions of a log entry that are not in order")
    if len({part.sender for part in found}) != len(found):
        raise Malformed("two contributions of one sender in a log entry")
    return found


@dataclass(frozen=True)
class Pin:
    """A snapshot that a replica serves: its log entry, and the digest of its index.

    `donor` is the peer that sent this pin; it is not on the wire.
    """

    round: int
    entry: bytes
    snapshot: bytes
    donor: str = field(default="", compare=False)

    def pack(self) -> bytes:
        """An item of `LogReply.pins`."""
        return _PIN.pack(round_sent(self.round), self.entry, self.snapshot)


def unpack_pin(data: bytes, donor: str = "") -> Pin:
    if len(data) != PIN_BYTES:
        raise Malformed("not a pinned snapshot")
    number, entry, snapshot = _PIN.unpack(data)
    return Pin(round_received(number), entry, snapshot, donor)
