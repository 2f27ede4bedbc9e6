"""What must hold in a storm, judged from the hosts' event logs and from samples of their processes.

Pure functions: a test can make the events up. Knows nothing of how faults are made.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.wan.events import Event, Logs, rounds
from node.commands.demo_swarm import descendants

HANG_ROUNDS = 3  # a host that is up says something in every round
AGREE_ROUNDS = 3  # so long after a fault replicas may stand on different digests
ESTABLISHED = "01"  # in /proc/net/tcp
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
    peers: int = 0  # other hosts at the far end of its TCP connections
    parts: Mapping[str, int] = field(default_factory=dict)  # the same, by process and kind

    @property
    def own_threads(self) -> int:
        """Without those of p2pd: Go keeps every thread that it once needed, for the next time."""
        return self.threads - self.parts.get("p2pd threads", 0)


def sample(pid: int, at_s: float) -> Sample:
    parts: Counter[str] = Counter()
    far_ends = _tcp_far_ends(pid)
    peers: set[str] = set()
    for one in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):
            kind = "node" if one == pid else _kind(one)
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in lines if ":" in line)
            parts[f"{kind} rss"] += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
            parts[f"{kind} threads"] += int(fields["Threads"])
            for place in Path(f"/proc/{one}/fd").iterdir():
                with contextlib.suppress(OSError):
                    name = os.readlink(place)
                    parts[f"{kind} {'tcp' if name in far_ends else name.split(':')[0]} open"] += 1
                    peers.add(far_ends.get(name, ""))
    return Sample(
        at_s,
        _sum(parts, "rss"),
        _sum(parts, "open"),
        _sum(parts, "threads"),
        len(peers - {""}),
        dict(parts),
    )


def _sum(parts: Mapping[str, int], what: str) -> int:
    return sum(value for key, value in parts.items() if key.endswith(f" {what}"))


def _kind(pid: int) -> str:
    """Which part of a host a child process is."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    if command.split(b"\0")[0].endswith(b"p2pd"):
        return "p2pd"
    return "trainer" if b"spawn_main" in command else "other"


def _tcp_far_ends(pid: int) -> dict[str, str]:
    """The TCP connections in a process's network: how its descriptor is called -> who is there."""
    out = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == ESTABLISHED:
                    out[f"socket:[{fields[9]}]"] = fields[2].split(":")[0]
    return out


def growth(samples: Mapping[str, Iterable[Sample]], end_s: float) -> dict[str, float]:
    """The most that a host grew, in percent, from when it had settled to the end."""
    counts = ("descriptor", "thread", "own_thread")
    out = {"memory_growth_percent": 0.0, **{f"{name}_growth": 0.0 for name in counts}}
    for found in samples.values():
        kept = sorted(found, key=lambda s: s.at_s)
        early = [s for s in kept if SETTLED * end_s <= s.at_s <= 2 * SETTLED * end_s]
        late = [s for s in kept if s.at_s >= (1 - SETTLED) * end_s]
        if not early or not late:
            continue
        ratio = _middle(late, "rss_bytes") / _middle(early, "rss_bytes")
        out["memory_growth_percent"] = max(out["memory_growth_percent"], 100 * (ratio - 1))
        for name in counts:
            more = _middle(late, f"{name}s") - _middle(early, f"{name}s")
            out[f"{name}_growth"] = max(out[f"{name}_growth"], more)
    return out


def held(samples: Iterable[Sample], end_s: float) -> dict[str, dict[str, int]]:
    """What a host held when it had settled and at the end, by process and kind of descriptor."""
    kept = sorted(samples, key=lambda s: s.at_s)
    out = {}
    for name, from_s, to_s in (
        ("settled", SETTLED * end_s, 2 * SETTLED * end_s),
        ("at the end", (1 - SETTLED) * end_s, end_s),
    ):
        found = [s for s in kept if from_s <= s.at_s <= to_s]
        if found:
            middle = found[len(found) // 2]
            out[name] = {"peers": middle.peers, **dict(sorted(middle.parts.items()))}
    return out


def _middle(samples: list[Sample], what: str) -> float:
    return float(statistics.median(getattr(s, what) for s in samples))


def alive(pids: Iterable[int], proc: Path = Path("/proc")) -> list[int]:
    """Those that still run. A zombie has ended, and what has no memory any more ends right now."""
    out = []
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = (proc / f"{pid}/status").read_text().splitlines()
            # Not its command line: that is empty for a moment at the start as well.
            if any(line.startswith("VmSize:") for line in lines):
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
            if _kind(child) == kind:
                out.append(child)
    return out


def of_peer(events: Iterable[Event]) -> str:
    return next((str(e["peer"]) for e in events), "")
