"""The figures of a run from its hosts' event logs: GB per nat, CE over cost, agreement.

How bytes are counted. A byte between two hosts is in both their logs. With the logs of all hosts,
the sum of sent bytes counts each byte once (`COUNT_SENT`). If logs are missing, sent and received
bytes of the logged hosts are added (`COUNT_BOTH`): the cost of these hosts, in which a byte between
two of them counts twice. `_all_hosts` decides which.

How CE is taken. A host may repeat its last measurement on later lines; only a value that differs
from its last one counts as a measurement. Hosts of a block that measured in one round are averaged.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from node.report.hosts import (
    HostMoment,
    HostRow,
    RoundRow,
    distinct_heads,
    host_rows,
    senders,
    timeline,
)
from node.report.logs import Log, ReportError
from swarm.events import RoundEvent

UNIFORM_CE_NATS = math.log(256)  # of uniform guessing: the CE of untrained weights
UNBALANCED = 0.1  # tolerated: bytes in flight, or in lines that a crash lost

COUNT_SENT = "sent"
COUNT_BOTH = "sent+received"


WHICH = ("consensus", "local")  # CE of the consensus, or of the running weights


@dataclass(frozen=True)
class Scale:
    """The parts of a run file that turn steps into bytes."""

    run_name: str
    step_bytes: int  # batch times context
    steps_per_round: int


@dataclass(frozen=True)
class CePoint:
    """CE after a round and the cost so far: bytes of the whole run; steps and text seen of all
    replicas of the block (for the mean: of an average block)."""

    round: int
    seconds: float
    moved_bytes: int
    steps: float
    seen_bytes: float | None
    ce_nats: float


@dataclass(frozen=True)
class CeSeries:
    """CE over time of one block; `block` None: the mean of all, once all were measured."""

    block: int | None
    which: str  # "consensus", or "local": the mean CE of its hosts' running weights
    points: tuple[CePoint, ...]


@dataclass(frozen=True)
class BlockRow:
    """A block's figures.

    `compared_rounds`: those for which two or more hosts named a head; `agreed_rounds`: those of
    them with one head; `most_heads`: the most different heads of one round.
    """

    block: int
    hosts: int
    rounds: int
    decided_rounds: int
    compared_rounds: int
    agreed_rounds: int
    most_heads: int
    first_ce_nats: float | None
    last_ce_nats: float | None
    best_ce_nats: float | None
    last_own_ce_nats: float | None  # of its hosts' running weights


@dataclass(frozen=True)
class RunReport:
    """All figures of one run."""

    name: str
    scale: Scale | None
    seconds: float
    counting: str
    counting_reason: str
    moved_bytes: int
    purposes: dict[str, int]
    steps: int
    first_ce_nats: float | None
    last_ce_nats: float | None
    last_own_ce_nats: float | None  # of the hosts' running weights
    outcomes: dict[str, int]
    blocks: tuple[BlockRow, ...]
    hosts: tuple[HostRow, ...]
    series: tuple[CeSeries, ...]
    heads: dict[tuple[int, int], int]  # (block, round of the consensus): distinct heads
    moments: tuple[HostMoment, ...]
    rows: tuple[RoundRow, ...]
    notes: tuple[str, ...]

    @property
    def seen_bytes(self) -> int | None:
        return self.steps * self.scale.step_bytes if self.scale else None

    @property
    def gb_per_nat(self) -> float | None:
        """All bytes over the nats gained since the first measurement: errs on the high side."""
        return self._gb_per_nat(self.first_ce_nats)

    @property
    def gb_per_nat_from_uniform(self) -> float | None:
        """All bytes over the nats gained against uniform guessing, where initial weights start."""
        return self._gb_per_nat(UNIFORM_CE_NATS)

    def _gb_per_nat(self, before: float | None) -> float | None:
        if before is None or self.last_ce_nats is None or before <= self.last_ce_nats:
            return None
        return self.moved_bytes / 1e9 / (before - self.last_ce_nats)

    def facts(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "name": self.name,
            "run_name": self.scale.run_name if self.scale else None,
            "seconds": self.seconds,
            "counting": self.counting,
            "counting_reason": self.counting_reason,
            "moved_bytes": self.moved_bytes,
            "bytes_by_purpose": self.purposes,
            "gb_per_nat": self.gb_per_nat,
            "gb_per_nat_from_uniform": self.gb_per_nat_from_uniform,
            "first_ce_nats": self.first_ce_nats,
            "last_ce_nats": self.last_ce_nats,
            "last_own_ce_nats": self.last_own_ce_nats,
            "steps": self.steps,
            "seen_bytes": self.seen_bytes,
            "outcomes": self.outcomes,
            "blocks": [asdict(block) for block in self.blocks],
            "hosts": [host.facts() for host in self.hosts],
            "ce": [asdict(series) for series in self.series],
            "heads": [{"block": b, "round": r, "heads": n} for (b, r), n in self.heads.items()],
            "timeline": [asdict(moment) for moment in self.moments],
            "notes": list(self.notes),
        }


def analyse(name: str, logs: Sequence[Log], scale: Scale | None) -> RunReport:
    """Compute the report from the hosts' logs."""
    notes = [note for log in logs for note in log.notes] + _twice(logs)
    events = sorted((e for log in logs for e in log.events), key=lambda e: e.time_s)
    if not events:
        raise ReportError(f"no events in {name}", "let the host close a round, then try again")
    rounds = [e for e in events if isinstance(e, RoundEvent)]
    if scale is None:
        notes.append("no run.toml among the logs: the text seen is given in steps, not in bytes")
    silent = {e.peer for e in events} - {e.peer for e in rounds}
    if silent:
        notes.append(f"hosts that closed no round, whose bytes are in no log: {len(silent)}")
    steps, step_notes = _steps(rounds, scale)
    counting, reason = _all_hosts(rounds, {event.peer for event in events})
    rows = _rows(rounds, steps, counting, events[0].time_s)
    series = _series(rows, scale)
    heads = distinct_heads(rounds)
    by_block: dict[int, list[RoundEvent]] = defaultdict(list)
    for event in rounds:
        by_block[event.block].append(event)
    blocks = tuple(_block(b, by_block[b], heads, series) for b in sorted(by_block))
    measured = [b for b in blocks if b.first_ce_nats is not None]
    for block in measured:
        if block.first_ce_nats == block.last_ce_nats:
            notes.append(f"block {block.block}: the CE of the consensus was measured only once")
    return RunReport(
        name=name,
        scale=scale,
        seconds=events[-1].time_s - events[0].time_s,
        counting=counting,
        counting_reason=reason,
        moved_bytes=rows[-1].moved_bytes if rows else 0,
        purposes=_purposes(rounds, counting),
        steps=sum(steps),
        first_ce_nats=_mean([b.first_ce_nats for b in measured]),
        last_ce_nats=_mean([b.last_ce_nats for b in measured]),
        last_own_ce_nats=_mean([b.last_own_ce_nats for b in measured]),
        outcomes=dict(Counter(e.outcome for e in rounds)),
        blocks=blocks,
        hosts=tuple(host_rows(events, rows)),
        series=series,
        heads=heads,
        moments=tuple(timeline(events)),
        rows=rows,
        notes=(*notes, *step_notes),
    )


def _twice(logs: Sequence[Log]) -> list[str]:
    places = defaultdict(set)
    for log in logs:
        for event in log.events:
            places[event.peer].add(log.source)
    return [
        f"host {peer} is in {len(found)} logs; if one is a copy, its bytes are counted twice"
        for peer, found in places.items()
        if len(found) > 1
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _steps(rounds: Sequence[RoundEvent], scale: Scale | None) -> tuple[list[int], list[str]]:
    """Steps of each line, and notes. Early hosts wrote running totals instead of a round's steps;
    they are recognised by growing beyond what the run file allows per round."""
    lines: dict[str, list[int]] = defaultdict(list)
    for index, event in enumerate(rounds):
        lines[event.peer].append(index)
    steps, totals = [event.steps for event in rounds], 0
    for own in lines.values():
        pairs = list(pairwise(own))
        growing = all(steps[a] <= steps[b] for a, b in pairs)
        if (
            scale
            and growing
            and any(
                steps[b] > 1.5 * scale.steps_per_round * max(1, rounds[b].round - rounds[a].round)
                for a, b in pairs
            )
        ):
            for a, b in reversed(pairs):
                steps[b] -= steps[a]
            totals += 1
    note = f"logs with running totals of steps: {totals}; their differences are used"
    return steps, [note] if totals else []


def _all_hosts(rounds: Sequence[RoundEvent], logged: set[str]) -> tuple[str, str]:
    """How to count bytes, and why: `COUNT_SENT` if the logs of all hosts of the run are here."""
    mentioned = {peer for e in rounds for peer in (*senders(e), *e.agreed, *e.left_out)}
    absent = len(mentioned - logged)
    if absent:
        return COUNT_BOTH, f"peers named in these logs without a log here: {absent}"
    if len(logged) < 2:
        return COUNT_BOTH, "there is the log of one host only"
    sent = received = 0
    for event in rounds:
        for part in event.traffic:
            # Clients and assemblers keep no event log, so this traffic is never balanced.
            if part.purpose not in ("assembly", "serving"):
                sent, received = sent + part.sent_bytes, received + part.received_bytes
    if abs(sent - received) > UNBALANCED * max(sent, received):
        return COUNT_BOTH, f"{sent} bytes were sent and {received} received: a log is missing"
    return COUNT_SENT, "every peer in these logs has its log here, and sent and received agree"


def _rows(
    rounds: Sequence[RoundEvent], steps: Sequence[int], counting: str, start_s: float
) -> tuple[RoundRow, ...]:
    rows, moved = [], 0
    for event, own_steps in zip(rounds, steps, strict=True):
        sent = sum(part.sent_bytes for part in event.traffic)
        received = sum(part.received_bytes for part in event.traffic)
        moved += sent + received * (counting == COUNT_BOTH)
        rows.append(RoundRow(event, event.time_s - start_s, sent, received, own_steps, moved))
    return tuple(rows)


def _purposes(rounds: Sequence[RoundEvent], counting: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for event in rounds:
        for part in event.traffic:
            found[part.purpose] += part.sent_bytes + part.received_bytes * (counting == COUNT_BOTH)
    return dict(found.most_common())


def _series(rows: Sequence[RoundRow], scale: Scale | None) -> tuple[CeSeries, ...]:
    out: list[CeSeries] = []
    for which in WHICH:
        points = _measured(rows, which, scale)
        found = [CeSeries(block, which, tuple(points[block])) for block in sorted(points)]
        if len(found) > 1:
            out.append(CeSeries(None, which, _average(found)))
        out += found
    return tuple(out)


def _measured(
    rows: Sequence[RoundRow], which: str, scale: Scale | None
) -> dict[int, list[CePoint]]:
    """Block -> its points: the mean of its hosts' CE in a round, and the cost at the last one."""
    last: dict[str, float] = {}
    steps: Counter[int] = Counter()
    found: dict[tuple[int, int], tuple[list[float], CePoint]] = {}
    for row in rows:
        event = row.event
        steps[event.block] += row.steps
        ce = event.consensus_ce_nats if which == "consensus" else event.local_ce_nats
        if ce is None or ce == last.get(event.peer):
            continue
        last[event.peer] = ce
        key, done = (event.block, event.round), steps[event.block]
        values = [*found[key][0], ce] if key in found else [ce]
        seen = done * scale.step_bytes if scale else None
        mean = sum(values) / len(values)
        point = CePoint(event.round, row.seconds, row.moved_bytes, done, seen, mean)
        found[key] = (values, point)
    points: dict[int, list[CePoint]] = defaultdict(list)
    for (block, _), (_, point) in sorted(found.items()):
        points[block].append(point)
    return points


def _average(found: Sequence[CeSeries]) -> tuple[CePoint, ...]:
    """The mean over blocks, one point per round in which any block was measured."""
    newest: dict[int | None, CePoint] = {}
    out: list[CePoint] = []
    marked = [(point, one.block) for one in found for point in one.points]
    for point, block in sorted(marked, key=lambda item: item[0].seconds):
        newest[block] = point
        if len(newest) < len(found):
            continue
        known = list(newest.values())
        seen = _mean([p.seen_bytes for p in known])
        ce = sum(p.ce_nats for p in known) / len(known)
        steps = sum(p.steps for p in known) / len(known)
        mean = CePoint(point.round, point.seconds, point.moved_bytes, steps, seen, ce)
        if out and out[-1].round == point.round:
            out.pop()  # replaced: another block was measured in the same round
        out.append(mean)
    return tuple(out)


def _block(
    block: int,
    own: Sequence[RoundEvent],
    heads: dict[tuple[int, int], int],
    series: Iterable[CeSeries],
) -> BlockRow:
    counts = [n for (b, _), n in heads.items() if b == block]
    found, local = (
        [p.ce_nats for s in series if (s.block, s.which) == (block, which) for p in s.points]
        for which in WHICH
    )
    return BlockRow(
        block=block,
        hosts=len({e.peer for e in own}),
        rounds=len({e.round for e in own}),
        decided_rounds=len({e.round for e in own if e.outcome == "decided"}),
        compared_rounds=len(counts),
        agreed_rounds=counts.count(1),
        most_heads=max(counts, default=0),
        first_ce_nats=found[0] if found else None,
        last_ce_nats=found[-1] if found else None,
        best_ce_nats=min(found, default=None),
        last_own_ce_nats=local[-1] if local else None,
    )
