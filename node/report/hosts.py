"""Participation in a run, from all hosts' event logs: a row per host, heads of the consensus, and
a timeline of restarts, moves and exclusions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarm.events import LogEvent, MoveEvent, NodeEvent, RoundEvent, TrustEvent


@dataclass
class HostRow:
    """A host's participation: from its own log and, for its updates, from those of its block."""

    peer: str
    logged: bool = False
    blocks: list[int] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)  # count of its own lines by outcome
    included: int = 0
    not_included: int = 0
    in_time: int = 0
    late: int = 0
    missing: int = 0
    refused: int = 0
    left_out_rounds: int = 0
    exclusions: int = 0
    steps: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def rounds(self) -> int:
        return sum(self.outcomes.values())

    @property
    def included_share(self) -> float | None:
        known = self.included + self.not_included
        return self.included / known if known else None

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "rounds": self.rounds, "included_share": self.included_share}


@dataclass(frozen=True)
class HostMoment:
    """An event of the timeline: a restart, a move, an exclusion."""

    seconds: float
    peer: str
    what: str
    detail: str


@dataclass(frozen=True)
class RoundRow:
    """A `round` line with the run's cost so far: a row of the CSV."""

    event: RoundEvent
    seconds: float
    sent_bytes: int
    received_bytes: int
    steps: int
    moved_bytes: int  # by the whole run so far


def host_rows(events: Sequence[LogEvent], rows: Sequence[RoundRow]) -> list[HostRow]:
    table: dict[str, HostRow] = {}
    left_out: set[tuple[str, int, int]] = set()

    def row_of(peer: str) -> HostRow:
        return table.setdefault(peer, HostRow(peer))

    for event in events:
        row_of(event.peer).logged = True
        if isinstance(event, TrustEvent):
            row_of(event.about).exclusions += 1
    for row in rows:
        event, own = row.event, row_of(row.event.peer)
        own.outcomes[event.outcome] = own.outcomes.get(event.outcome, 0) + 1
        own.included += event.included is True
        own.not_included += event.included is False
        own.steps += row.steps
        own.sent_bytes += row.sent_bytes
        own.received_bytes += row.received_bytes
        for what in ("in_time", "late", "missing"):
            for peer in getattr(event, what):
                other = row_of(peer)
                setattr(other, what, getattr(other, what) + 1)
        for refusal in event.refused:
            row_of(refusal.peer).refused += 1
        left_out.update((peer, event.block, event.round) for peer in event.left_out)
        for peer in (event.peer, *senders(event)):
            if event.block not in row_of(peer).blocks:
                row_of(peer).blocks.append(event.block)
    for peer, _, _ in left_out:
        row_of(peer).left_out_rounds += 1
    return sorted(table.values(), key=lambda h: (not h.logged, h.blocks, h.peer))


def senders(event: RoundEvent) -> tuple[str, ...]:
    return (*event.in_time, *event.late, *event.missing, *(r.peer for r in event.refused))


def distinct_heads(rounds: Sequence[RoundEvent]) -> dict[tuple[int, int], int]:
    """(block, round) -> number of distinct consensus digests, if two or more hosts named one."""
    named: dict[tuple[int, int], set[str]] = defaultdict(set)
    hosts: dict[tuple[int, int], set[str]] = defaultdict(set)
    for event in rounds:
        key = (event.block, event.consensus_round)
        named[key].add(event.consensus)
        hosts[key].add(event.peer)
    return {key: len(named[key]) for key in sorted(named) if len(hosts[key]) > 1}


def timeline(events: Sequence[LogEvent]) -> list[HostMoment]:
    start = events[0].time_s
    found = []
    for e in events:
        if isinstance(e, NodeEvent):
            facts = ", ".join(f"{name}={value}" for name, value in e.facts.items())
            detail = " ".join(part for part in (e.detail, facts) if part)
            found.append(HostMoment(e.time_s - start, e.peer, e.what, detail))
        elif isinstance(e, MoveEvent):
            how = ", from a snapshot" if e.from_snapshot else ""
            detail = (
                f"block {e.block}, round {e.round}: {e.mode}, {e.rolled_back} steps of the log "
                f"undone and {e.applied} made{how}, to {e.after[:12]}"
            )
            found.append(HostMoment(e.time_s - start, e.peer, "moved", detail))
        elif isinstance(e, TrustEvent):
            detail = (
                f"block {e.block}, round {e.round}: {e.about} until round {e.until_round}: "
                f"{e.reason}"
            )
            found.append(HostMoment(e.time_s - start, e.peer, "excluded", detail))
    return found
