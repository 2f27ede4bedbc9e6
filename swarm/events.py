"""The event log: what a node writes down about every round, one JSON object per line.

Decides the schema (docs/events.md describes it for readers) and checks lines against it. Knows
nothing of files. Status, report and benchmarks read these lines and nothing else.

The schema is the dataclasses below: a field's annotation is its type, a field with a default may be
missing. Unknown fields are kept out when reading, so a newer node's log stays readable.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.errors import DataError

SCHEMA_VERSION = 1
MAX_LINE_BYTES = 65536
PURPOSES = (
    "update",
    "vote",
    "repair",
    "catch-up",
    "relay",
    "record",
    "assembly",
    "serving",
    "control",
)
MOVES = ("rebase", "merge", "keep")
OUTCOMES = ("decided", "empty", "undecided", "syncing", "missed")


class EventError(DataError):
    """A line of an event log that does not follow the schema."""


@dataclass(frozen=True)
class Refusal:
    """An update that was refused, and why (the message of the check that failed)."""

    peer: str
    reason: str


@dataclass(frozen=True)
class Traffic:
    """Bytes on the wire in a round, of one purpose."""

    purpose: str
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class RoundEvent:
    """The exchange of one round, written when it is closed."""

    kind: typing.ClassVar[str] = "round"
    time_s: float
    peer: str
    block: int
    round: int
    outcome: str
    in_time: tuple[str, ...]
    late: tuple[str, ...]
    missing: tuple[str, ...]
    refused: tuple[Refusal, ...]
    agreed: tuple[str, ...]
    left_out: tuple[str, ...]
    included: bool | None
    voters: int
    first_deadline_s: float
    consensus: str
    consensus_round: int
    update_bytes: int
    traffic: tuple[Traffic, ...]
    local_ce_nats: float | None = None
    consensus_ce_nats: float | None = None
    steps: int = 0
    copy_ages_rounds: tuple[int, ...] = ()
    declined: tuple[Refusal, ...] = ()  # who did not accept our update, and why
    replicas: float = 1.0  # how many hosts' work the last rounds had


@dataclass(frozen=True)
class MoveEvent:
    """The replica moved onto another consensus."""

    kind: typing.ClassVar[str] = "move"
    time_s: float
    peer: str
    block: int
    round: int
    before: str
    after: str
    rolled_back: int
    applied: int
    from_snapshot: bool
    mode: str


@dataclass(frozen=True)
class TrustEvent:
    """A peer was excluded for a time."""

    kind: typing.ClassVar[str] = "trust"
    time_s: float
    peer: str
    block: int
    round: int
    about: str
    reason: str
    until_round: int


@dataclass(frozen=True)
class NodeEvent:
    """Something about the host itself; docs/events.md says what there is."""

    kind: typing.ClassVar[str] = "node"
    time_s: float
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
    """One line, without the newline. NaN is not JSON: such a CE is written as null by its owner."""
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
    """Check a decoded line against the schema; EventError names the field that is wrong."""
    if not isinstance(data, dict):
        raise EventError("event is not an object")
    if data.get("v") != SCHEMA_VERSION:
        raise EventError(f"event of schema version {data.get('v')!r}, not {SCHEMA_VERSION}")
    kind = data.get("kind")
    known = KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise EventError(f"event of unknown kind {kind!r}")
    event = typing.cast(LogEvent, _build(known, data, known.kind))
    if isinstance(event, MoveEvent) and event.mode not in MOVES:
        raise EventError(f"move.mode is {event.mode!r}")
    if isinstance(event, RoundEvent):
        if event.outcome not in OUTCOMES:
            raise EventError(f"round.outcome is {event.outcome!r}")
        for part in event.traffic:
            if part.purpose not in PURPOSES or min(part.sent_bytes, part.received_bytes) < 0:
                raise EventError(f"round.traffic has a wrong entry for {part.purpose!r}")
    return event


def _build(target: type, data: Mapping[str, object], where: str) -> object:
    hints = typing.get_type_hints(target)
    values = {}
    for f in dataclasses.fields(target):
        if f.name in data:
            values[f.name] = _value(hints[f.name], data[f.name], f"{where}.{f.name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise EventError(f"{where}.{f.name} is missing")
    return target(**values)


def _value(hint: typing.Any, value: object, where: str) -> object:
    """One JSON value as the annotation wants it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        return None if value is None else _value(arguments[0], value, where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_value(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {k: _value(arguments[1], v, f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
        if not math.isfinite(number):
            raise EventError(f"{where} is not finite")
        return number
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise EventError(f"{where} is {value!r}")
