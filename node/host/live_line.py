"""What a host shows while it takes part: one line on a terminal that is written anew, or log lines.

Decides the words for a round, for its verdict on our update and for the state between rounds, and
what is left away where the terminal is narrow. All of it comes from the host's events, so that one
host and the supervisor of several show the same things. `node.console.terminal` owns the screen.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from node.console.amounts import size_words
from node.console.terminal import one_line
from swarm.events import LogEvent, NodeEvent, RoundEvent

DAY_S = 86400.0
GAP = "  "


def verdict(event: RoundEvent) -> str:
    """Whether our update of this round counts, and if not, why."""
    if event.included:
        return "included"
    if event.outcome == "missed":
        return "not sent (the round was over)"
    if event.outcome == "syncing":
        return f"{'left out' if event.included is False else 'not sent'} (catching up)"
    if event.included is None:
        return "not counted yet" if event.update_bytes else "not sent (not ready in time)"
    if event.peer in event.left_out:
        return "left out (an outlier)"
    if event.declined:
        why, said = Counter(one.reason for one in event.declined).most_common(1)[0]
        hosts = f"{said} of {event.voters} hosts" if event.voters else f"{said} hosts"
        return f"left out (by {hosts}: {why})"
    if event.outcome == "undecided":
        return "left out (no majority)"
    if event.outcome == "empty":
        return "left out (nothing was agreed)"
    return "left out (came too late for most)"


def round_line(event: RoundEvent) -> str:
    """A round in one line of a log."""
    traffic = sum(t.sent_bytes + t.received_bytes for t in event.traffic)
    ce = "" if event.consensus_ce_nats is None else f"{GAP}CE {event.consensus_ce_nats:.3f}"
    late = f" + {len(event.late)} late" if event.late else ""
    return (
        f"block {event.block}{GAP}round {event.round}{GAP}{event.outcome}{GAP}{verdict(event)}"
        f"{GAP}updates of {len(event.in_time)}{late} others{ce}{GAP}{size_words(traffic)}"
        f"{GAP}{event.consensus[:8]}"
    )


@dataclass
class HostView:
    """One host as its events tell it."""

    block: int | None = None
    last: RoundEvent | None = None
    state: str = "joining"
    moved: deque[tuple[float, int]] = field(default_factory=deque)  # (when, bytes)
    consensus_ce_nats: float | None = None  # measured last: not every round has the time
    local_ce_nats: float | None = None

    def hear(self, event: LogEvent) -> None:
        match event:
            case RoundEvent():
                self.block, self.last, self.state = event.block, event, ""
                self.remember([event])
                if event.consensus_ce_nats is not None:
                    self.consensus_ce_nats = event.consensus_ce_nats
                if event.local_ce_nats is not None:
                    self.local_ce_nats = event.local_ce_nats
            case NodeEvent(
                what="started" | "resumed" | "first_step" | "unpaused" | "within_budget"
            ):
                self.state = "" if self.last else "training, the first exchange is to come"
            case NodeEvent(what="paused"):
                self.state = "paused"
            case NodeEvent(what="over_budget"):
                self.state = "over the budget of the day"
            case NodeEvent(what="run_ended"):
                self.state = "the run is over"

    def remember(self, events: Iterable[LogEvent]) -> None:
        """Bytes of rounds, also of those before this process: the day is the host's, not ours."""
        for event in events:
            if isinstance(event, RoundEvent):
                size = sum(t.sent_bytes + t.received_bytes for t in event.traffic)
                self.moved.append((event.time_s, size))

    def moved_bytes(self, now_s: float) -> int:
        """In the last 24 hours."""
        while self.moved and self.moved[0][0] < now_s - DAY_S:
            self.moved.popleft()
        return sum(size for _, size in self.moved)

    @property
    def peers(self) -> set[str]:
        event = self.last
        return {*event.in_time, *event.late, *event.missing} if event else set()


@dataclass(frozen=True)
class RunTimes:
    """The run's rounds, to say when the next exchange is."""

    start_s: float
    period_s: float
    count: int

    def words(self, now_s: float) -> str:
        if now_s < self.start_s:
            return f"the run begins in {self.start_s - now_s:.0f} s"
        left_s = self.period_s - (now_s - self.start_s) % self.period_s
        if (now_s - self.start_s) // self.period_s >= self.count:
            return "the run is over"
        return f"next exchange in {left_s:.0f} s"


# A part of the line and how dear it is: of a narrow terminal the cheapest leave first.
LinePart = tuple[int, str]


def fitted(parts: Sequence[LinePart], width: int) -> str:
    """The parts in their order; as many as fit, the dearest for certain. Never longer."""
    kept = [part for part in parts if part[1]]
    while len(kept) > 1 and len(GAP.join(text for _, text in kept)) > width:
        kept.remove(min(kept, key=lambda part: part[0]))
    line = one_line(GAP.join(text for _, text in kept), collapse=False)
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def host_line(
    view: HostView, times: RunTimes, budget_bytes: int | None, now_s: float, loss_nats: float | None
) -> list[LinePart]:
    """The live line of one host."""
    last = view.last
    ce = _ce(view)
    loss = "" if loss_nats is None or ce else f"loss {loss_nats:.3f}"
    return [
        (9, "" if view.block is None else f"block {view.block}"),
        (8, f"round {last.round}/{times.count}" if last else ""),
        (7, view.state or (verdict(last) if last else "")),
        (6, ce or loss),
        (3, _peers(len(view.peers)) if last else ""),
        (4, _moved(view.moved_bytes(now_s), budget_bytes)),
        (5, "" if view.state == "the run is over" else times.words(now_s)),
    ]


def fleet_line(
    views: Sequence[HostView], times: RunTimes, budget_bytes: int | None, now_s: float
) -> list[LinePart]:
    """The live line of several workers of one host."""
    seen = [view.last for view in views if view.last]
    newest = max((event.round for event in seen), default=-1)
    now = [event for event in seen if event.round == newest]
    included = sum(event.included is True for event in now)
    blocks = " ".join("-" if v.block is None else str(v.block) for v in views)
    peers = set().union(*(view.peers for view in views)) - {event.peer for event in seen}
    known = [v.consensus_ce_nats for v in views if v.consensus_ce_nats is not None]
    ce = f"CE {min(known):.3f} to {max(known):.3f}" if known else ""
    states = {view.state for view in views if view.state}
    return [
        (9, f"{len(views)} workers on blocks {blocks}"),
        (8, f"round {newest}/{times.count}" if seen else ""),
        (7, f"{included} of {len(now)} included" if now else ", ".join(sorted(states))),
        (6, ce if len(known) != 1 else f"CE {known[0]:.3f}"),
        (3, _peers(len(peers)) if seen else ""),
        (4, _moved(sum(view.moved_bytes(now_s) for view in views), budget_bytes)),
        (5, times.words(now_s)),
    ]


def _ce(view: HostView) -> str:
    ours, all_of_us = view.local_ce_nats, view.consensus_ce_nats
    parts = [f"CE {all_of_us:.3f}"] if all_of_us is not None else []
    parts += [f"own {ours:.3f}"] if ours is not None else []
    return " ".join(parts)


def _peers(count: int) -> str:
    return "alone on it" if not count else f"{count} peer{'s' * (count != 1)}"


def _moved(moved_bytes: int, budget_bytes: int | None) -> str:
    if budget_bytes is None:
        return f"{size_words(moved_bytes)} today"
    return f"{size_words(moved_bytes)} of {size_words(budget_bytes)} today"
