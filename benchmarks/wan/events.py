"""What the event logs of a swarm on the bed say: who took part, how long rounds took, CE, bytes.

Pure functions over events, so that a test can make them up. Knows nothing of beds or processes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Logs = Mapping[str, list[Event]]  # of every worker, by its name


def read(folder: Path) -> list[Event]:
    """The events of a worker so far. A line that is being written is left for the next time."""
    try:
        data = (folder / "events.jsonl").read_bytes()
    except FileNotFoundError:
        return []
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return [json.loads(line) for line in lines]


def rounds(events: Iterable[Event], first: int = 0) -> list[Event]:
    return [e for e in events if e["kind"] == "round" and e["round"] >= first]


def said(events: Iterable[Event], what: str) -> bool:
    return any(e["kind"] == "node" and e["what"] == what for e in events)


def common_first(logs: Logs) -> int:
    """The first round by which an update of every worker of a set had counted."""
    firsts = []
    for events in logs.values():
        counted = [e["round"] for e in rounds(events) if e["included"] is True]
        firsts.append(min(counted, default=1 << 30))
    return max(firsts, default=1 << 30)


def included_share(logs: Logs, first: int = 0) -> float:
    """Of the rounds in which workers sent an update: how many included it. 0 if none was sent."""
    sent = [e for events in logs.values() for e in rounds(events, first) if e["update_bytes"] > 0]
    return sum(e["included"] is True for e in sent) / len(sent) if sent else 0.0


def seconds_per_decision(logs: Logs, first: int) -> float:
    """How long a round of these workers lasted, undecided ones counted as time lost."""
    spans = []
    for events in logs.values():
        found = rounds(events, first)
        decided = [e for e in found if e["outcome"] == "decided"]
        if len(found) > 1 and decided:
            span_s = (found[-1]["time_s"] - found[0]["time_s"]) * len(found) / (len(found) - 1)
            spans.append(span_s / len(decided))
    return statistics.fmean(spans) if spans else 0.0


def deadline_s(logs: Logs, first: int) -> float:
    """How long these workers waited for updates, on average."""
    waits = [e["first_deadline_s"] for events in logs.values() for e in rounds(events, first)]
    return statistics.fmean(waits) if waits else 0.0


def of_block(logs: Logs, block: int, without: Collection[str] = ()) -> dict[str, list[Event]]:
    return {
        name: events
        for name, events in logs.items()
        if name not in without and (found := rounds(events)) and found[-1]["block"] == block
    }


def curve(logs: Logs) -> list[tuple[int, float, float]]:
    """Round, GB that frames took until then, the newest CE of the last block."""
    every = sorted(
        (e for events in logs.values() for e in rounds(events)), key=lambda e: float(e["time_s"])
    )
    last = max((e["block"] for e in every), default=0)
    moved = 0
    points: list[tuple[int, float, float]] = []
    for event in every:
        moved += sum(part["sent_bytes"] for part in event["traffic"])
        ce = event["consensus_ce_nats"]
        if event["block"] == last and ce is not None:
            if points and points[-1][0] == event["round"]:
                points.pop()
            points.append((event["round"], moved / 1e9, ce))
    return points


def bytes_by_purpose(logs: Logs) -> dict[str, int]:
    """Bytes of frames that all workers sent."""
    out: dict[str, int] = {}
    for events in logs.values():
        for event in rounds(events):
            for part in event["traffic"]:
                out[part["purpose"]] = out.get(part["purpose"], 0) + part["sent_bytes"]
    return out
