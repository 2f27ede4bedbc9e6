"""The schema of the event log: what a node logs about every round, one JSON object per line.

Described in docs/events.md. `status`, `report` and benchmarks read only these lines.

The schema is the dataclasses below: annotations give types and bounds, a field with a default may
be missing. Unknown fields are ignored, so a newer node's log stays readable. Bounds are checked
when lines are read, not when they are written.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import msgspec

from protocol.errors import DataError
from protocol.limits import TIME_MAX_S
from swarm.tables import fault

SCHEMA_VERSION = 1
MAX_LINE_BYTES = 65536
MAX_BLOCKS = 1024  # as in a run file

Purpose = Literal[
    "update",
    "vote",
    "repair",
    "catch-up",
    "relay",
    "record",
    "assembly",
    "serving",
    "control",
]
Move = Literal["rebase", "merge", "keep"]
Outcome = Literal["decided", "empty", "undecided", "syncing", "missed"]
# Bounded for sums and plots: a float holds integers exactly up to this.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
BlockNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_BLOCKS)]
Round = Annotated[int, msgspec.Meta(ge=-1, lt=2**53)]  # -1: before the first
Seconds = Annotated[float, msgspec.Meta(ge=0, le=TIME_MAX_S)]
Hosts = Annotated[float, msgspec.Meta(ge=0, lt=2**53)]
Nats = Annotated[float, msgspec.Meta(ge=0, le=1000)]


class EventError(DataError):
    """A line of an event log that does not follow the schema."""


@dataclass(frozen=True)
class Refusal:
    """A peer whose update was refused, or that declined ours, and the reason."""

    peer: str
    reason: str


@dataclass(frozen=True)
class Traffic:
    """Bytes on the wire in a round, for one purpose."""

    purpose: Purpose
    sent_bytes: Count
    received_bytes: Count


@dataclass(frozen=True)
class RoundEvent:
    """The exchange of one round, logged when it is closed."""

    kind: ClassVar[str] = "round"
    time_s: Seconds
    peer: str
    block: BlockNumber
    round: Round
    outcome: Outcome
    in_time: tuple[str, ...]
    late: tuple[str, ...]
    missing: tuple[str, ...]
    refused: tuple[Refusal, ...]
    agreed: tuple[str, ...]
    left_out: tuple[str, ...]
    included: bool | None
    voters: Count
    first_deadline_s: Seconds
    consensus: str
    consensus_round: Round
    update_bytes: Count
    traffic: tuple[Traffic, ...]
    local_ce_nats: Nats | None = None
    consensus_ce_nats: Nats | None = None
    steps: Count = 0
    copy_ages_rounds: tuple[int, ...] = ()
    declined: tuple[Refusal, ...] = ()  # voters that did not accept our update, and why
    replicas: Hosts = 1.0  # average number of hosts in the last rounds, by work


@dataclass(frozen=True)
class MoveEvent:
    """The replica moved onto another consensus."""

    kind: ClassVar[str] = "move"
    time_s: Seconds
    peer: str
    block: BlockNumber
    round: Round
    before: str
    after: str
    rolled_back: Count
    applied: Count
    from_snapshot: bool
    mode: Move


@dataclass(frozen=True)
class TrustEvent:
    """A peer was excluded for a time."""

    kind: ClassVar[str] = "trust"
    time_s: Seconds
    peer: str
    block: BlockNumber
    round: Round
    about: str
    reason: str
    until_round: int


@dataclass(frozen=True)
class NodeEvent:
    """Something about the host itself; docs/events.md says what there is."""

    kind: ClassVar[str] = "node"
    time_s: Seconds
    peer: str
    what: str
    detail: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)


LogEvent = RoundEvent | MoveEvent | TrustEvent | NodeEvent
KINDS: dict[str, type[LogEvent]] = {
    kind.kind: kind for kind in (RoundEvent, MoveEvent, TrustEvent, NodeEvent)
}


def to_dict(event: LogEvent) -> dict[str, object]:
    """The event as plain JSON values."""
    return {"v": SCHEMA_VERSION, "kind": event.kind, **dataclasses.asdict(event)}


def to_line(event: LogEvent) -> str:
    """The event as a line, without the newline. NaN is not JSON: the caller passes None instead."""
    return json.dumps(to_dict(event), separators=(",", ":"), sort_keys=True, allow_nan=False)


def from_line(line: str) -> LogEvent:
    """Parse and check one line."""
    if len(line) > MAX_LINE_BYTES:
        raise EventError(f"event line of {len(line)} characters")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EventError(f"event line is not JSON: {error}") from None
    return from_dict(data)


def from_dict(data: object) -> LogEvent:
    """Check a decoded line against the schema. Raises EventError, which names the wrong field."""
    if not isinstance(data, dict):
        raise EventError("event is not an object")
    if data.get("v") != SCHEMA_VERSION:
        raise EventError(f"event of schema version {data.get('v')!r}, not {SCHEMA_VERSION}")
    kind = data.get("kind")
    known = KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise EventError(f"event of unknown kind {kind!r}")
    try:
        return msgspec.convert(data, known)
    except msgspec.ValidationError as error:
        raise EventError(fault(error, known.kind)) from None
