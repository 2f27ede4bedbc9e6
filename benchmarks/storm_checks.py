"""What must hold in a storm, judged from the hosts' event logs and from samples of their processes.

Pure functions: a test can make the events up. Knows nothing of how faults are made.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.three_hosts_events import Event, Logs, rounds
from node.demo import descendants

HANG_ROUNDS = 3  # a host that is up says something in every round
AGREE_ROUNDS = 3  # so long after a fault replicas may stand on different digests
SETTLED = 0.25  # memory is compared with that after this part of the storm

Span = tuple[float, float]  # unix time from, to


@dataclass(frozen=True)
class Excuse:
    """A time in which a host was down or stopped, and need not answer."""

    name: str
    from_s: float
    to_s: float


def hangs(
    logs: Logs, excuses: Sequence[Excuse], period_s: float, storm: Span
) -> list[tuple[str, float, float]]:
    """(host, since, how long) of every silence of a host that was up, longer than it may be."""
    limit_s, found = HANG_ROUNDS * period_s, []
    for name, events in logs.items():
        times = [max(storm[0], e["time_s"]) for e in events if e["time_s"] < storm[1]]
        away = sorted((x.from_s, x.to_s) for x in excuses if x.name == name)
        marks = sorted([*times, storm[1]])
        for one, other in itertools.pairwise(marks):
            silent_s = other - one - sum(_overlap((one, other), span) for span in away)
            if silent_s > limit_s:
                found.append((name, one - storm[0], silent_s))
    return found


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def disagreements(logs: Logs, apart: Sequence[range]) -> list[tuple[int, int, int]]:
    """(block, first round, rounds) of every stretch in which replicas disagreed for too long.

    `apart`: rounds in which a partition was open, where they must disagree.
    """
    stands: dict[tuple[int, int], set[str]] = {}
    for events in logs.values():
        for event in rounds(events):
            stands.setdefault((event["block"], event["round"]), set()).add(event["consensus"])
    found = []
    for block in sorted({block for block, _ in stands}):
        first, length = 0, 0
        numbers = sorted(number for which, number in stands if which == block)
        for number in [*numbers, 1 << 40]:
            differs = len(stands.get((block, number), ())) > 1
            if differs and not any(number in span for span in apart):
                first, length = (number, 1) if not length else (first, length + 1)
                continue
            if length > AGREE_ROUNDS:
                found.append((block, first, length))
            length = 0
    return found


def stands(logs: Logs, block: int, numbers: range) -> list[str]:
    """Who stood where in these rounds of a block, to see why they disagreed."""
    return [
        f"{event['round']} {name}: {event['consensus'][:8]} of round {event['consensus_round']}, "
        f"{event['outcome']}, agreed on {len(event['agreed'])}"
        for number in numbers
        for name, events in logs.items()
        for event in rounds(events)
        if event["block"] == block and event["round"] == number
    ]


def lost_rounds(logs: Logs) -> int:
    """The most rounds by which any host's consensus ever fell back from one round to the next."""
    lost = 0
    for events in logs.values():
        at = [e["consensus_round"] for e in rounds(events)]
        lost = max([lost, *(one - other for one, other in itertools.pairwise(at))])
    return lost


def undecided_rounds(logs: Logs, last: int) -> int:
    """Rounds up to the last in which no host of a block decided anything, over all blocks."""
    decided: dict[int, set[int]] = {}
    seen: dict[int, set[int]] = {}
    for events in logs.values():
        for event in rounds(events):
            seen.setdefault(event["block"], set()).add(event["round"])
            if event["outcome"] == "decided":
                decided.setdefault(event["block"], set()).add(event["round"])
    return sum(
        number not in decided.get(block, set())
        for block, numbers in seen.items()
        for number in range(min(numbers), min(last, max(numbers)) + 1)
    )


def ce_ends(logs: Logs) -> tuple[float, float]:
    """Mean CE of the blocks' consensus: of the first and the last tenth of what was measured."""
    measured = sorted(
        (e["time_s"], e["consensus_ce_nats"])
        for events in logs.values()
        for e in rounds(events)
        if e["consensus_ce_nats"] is not None
    )
    ces = [ce for _, ce in measured]
    tenth = max(1, len(ces) // 10)
    if not ces:
        return 0.0, 0.0
    return statistics.fmean(ces[:tenth]), statistics.fmean(ces[-tenth:])


def left_out(logs: Logs, peer: str) -> tuple[int, int]:
    """In how many decided rounds a peer's update counted, and how often it was seen at all."""
    counted = seen = 0
    for events in logs.values():
        for event in rounds(events):
            refused = {r["peer"] for r in event["refused"]}
            if peer in refused or peer in (*event["in_time"], *event["late"], *event["agreed"]):
                seen += 1
                counted += peer in event["agreed"] and peer not in event["left_out"]
    return counted, seen


# --- processes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What a host's processes hold at a moment of the storm."""

    at_s: float
    rss_bytes: int
    descriptors: int
    threads: int


def sample(pid: int, at_s: float) -> Sample:
    rss = descriptors = threads = 0
    for one in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in lines if ":" in line)
            rss += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
            threads += int(fields["Threads"])
            descriptors += len(os.listdir(f"/proc/{one}/fd"))
    return Sample(at_s, rss, descriptors, threads)


def growth(samples: Mapping[str, Iterable[Sample]], end_s: float) -> dict[str, float]:
    """The most that a host grew, in percent, from when it had settled to the end."""
    out = {"memory_growth_percent": 0.0, "descriptor_growth": 0.0, "thread_growth": 0.0}
    for found in samples.values():
        kept = sorted(found, key=lambda s: s.at_s)
        early = [s for s in kept if SETTLED * end_s <= s.at_s <= 2 * SETTLED * end_s]
        late = [s for s in kept if s.at_s >= (1 - SETTLED) * end_s]
        if not early or not late:
            continue
        ratio = _middle(late, "rss_bytes") / _middle(early, "rss_bytes")
        out["memory_growth_percent"] = max(out["memory_growth_percent"], 100 * (ratio - 1))
        for name in ("descriptor", "thread"):
            more = _middle(late, f"{name}s") - _middle(early, f"{name}s")
            out[f"{name}_growth"] = max(out[f"{name}_growth"], more)
    return out


def _middle(samples: list[Sample], what: str) -> float:
    return float(statistics.median(getattr(s, what) for s in samples))


def alive(pids: Iterable[int]) -> list[int]:
    """Those that still run. A zombie has ended, and what has no memory any more ends right now."""
    out = []
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and Path(f"/proc/{pid}/cmdline").read_bytes():
                out.append(pid)
    return out


def words(pid: int) -> str:
    """The beginning of a process's command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return "gone by now"


def children_of(pid: int, kind: str) -> list[int]:
    """The p2pd or the trainer of a host, by what their command line says."""
    out = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{child}/cmdline").read_bytes()
            is_daemon = words.split(b"\0")[0].endswith(b"p2pd")
            is_trainer = b"spawn_main" in words and b"tracker" not in words
            if (kind == "p2pd" and is_daemon) or (kind == "trainer" and is_trainer):
                out.append(child)
    return out


def of_peer(events: Iterable[Event]) -> str:
    return next((str(e["peer"]) for e in events), "")
