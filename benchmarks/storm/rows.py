"""A storm from its first host to its judgement: rows and figures."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.storm import checks
from benchmarks.storm.faults import Storm, schedule_of
from benchmarks.storm.swarm import HOSTS, PERIOD_S, QUICK_HOSTS, storm_run, topology
from benchmarks.wan import events as log
from benchmarks.wan import namespaces
from benchmarks.wan.bed import LEAVE_S, Bed
from benchmarks.wan.processes import START_S
from benchmarks.wan.runner import SwarmOnBed, run_start_s
from swarm.run_template import emit

MINUTES, QUICK_MINUTES = 5.0, 1.0
MUST_BE_NONE = ("hangs", "lost_rounds", "digest_disagreements", "orphans", "lies_counted")


def run(quick: bool) -> tuple[harness.Figures, harness.Rows]:
    minutes = QUICK_MINUTES if quick else MINUTES
    rounds = int((minutes * 60 + 2 * START_S) / PERIOD_S)
    with (
        tempfile.TemporaryDirectory(prefix="blockswarm-storm-") as scratch,
        Bed(topology(QUICK_HOSTS if quick else HOSTS)) as bed,
    ):
        folder = Path(scratch)
        (folder / "run.toml").write_bytes(emit(storm_run(rounds)))
        swarm = SwarmOnBed(bed, folder, folder, _say)
        swarm.start()
        swarm.until_all_train()
        storm = Storm(swarm, _say)
        storm.weather(schedule_of(storm, quick), minutes * 60)
        end_s = storm.finish()
        stayed = bed.stop_processes()
        storm.stayed = [name for name, _ in swarm.commands if storm.pid(name) in stayed]
        storm.orphans += left_behind(bed)
        logs = {name: log.read(folder / f"{name}-0") for name, _ in swarm.commands}
        figures, rows = judge(storm, logs, end_s, minutes)
        if any(figures[name] for name in MUST_BE_NONE):
            _say(f"the hosts' logs of what went wrong: {kept_logs(folder)}")
        return figures, rows


def kept_logs(folder: Path) -> Path:
    """Copies of the event logs, which nobody removes: a rare fault may not come again."""
    kept = Path(tempfile.mkdtemp(prefix="blockswarm-storm-failed-"))
    for place in folder.glob("*/events.jsonl"):
        (kept / place.parent.name).mkdir()
        shutil.copy(place, kept / place.parent.name)
    return kept


def left_behind(bed: Bed) -> list[str]:
    """What still runs on the hosts in the moment in which all of them have left."""
    return [
        f"{pid} of {host.name} after the end: {checks.words(pid)}"
        for host in bed.topology.hosts
        for pid in checks.alive(namespaces.pids(bed.namespace(host.name)))
    ]


def judge(
    storm: Storm, logs: dict[str, list[log.Event]], end_s: float, minutes: float
) -> tuple[harness.Figures, harness.Rows]:
    liar = logs.pop("liar", [])
    start_s = run_start_s(storm.swarm.folder)
    began = int((storm.began_s - start_s) // PERIOD_S)
    ended = int((end_s - start_s) // PERIOD_S)
    in_storm = {
        name: [e for e in events if e["kind"] != "round" or began <= e["round"] < ended]
        for name, events in logs.items()
    }
    apart = [
        range(int((a - start_s) // PERIOD_S), int((min(b, end_s) - start_s) // PERIOD_S) + 1)
        for a, b in storm.apart
    ]
    hangs = checks.hangs(logs, storm.excuses, PERIOD_S, (storm.began_s, end_s))
    hangs += [(name, end_s - storm.began_s, LEAVE_S) for name in storm.stayed]
    split = checks.disagreements(in_storm, apart)
    calm = {k: v for k, v in storm.samples.items() if k not in (*storm.disturbed, "liar", "new")}
    ce_first, ce_last = checks.ce_ends(logs)
    counted, seen = checks.left_out(logs, checks.of_peer(liar)) if liar else (0, 0)
    figures: harness.Figures = {
        "minutes": minutes,
        "faults": len(storm.faults),
        "hangs": len(hangs),
        "lost_rounds": checks.lost_rounds(in_storm),
        "undecided_rounds": checks.undecided_rounds(in_storm, ended - 2),
        "digest_disagreements": len(split),
        "orphans": len(storm.orphans),
        **checks.growth(calm, minutes * 60),
        "ce_first": ce_first,
        "ce_last": ce_last,
        "lies_seen": seen,
        "lies_counted": counted,
    }
    rows: harness.Rows = [{"name": words.split(": ", 1)[1], "at": words} for words in storm.faults]
    rows += [
        {"name": "hang", "host": name, "at_s": round(at, 1), "seconds": round(s, 1)}
        for name, at, s in hangs
    ]
    rows += [
        {
            "name": "disagreement",
            "block": block,
            "round": first,
            "rounds": length,
            "stands": checks.stands(in_storm, block, range(first - 1, first + length + 1)),
        }
        for block, first, length in split
    ]
    rows += [{"name": "orphan", "process": words} for words in storm.orphans]
    rows += [_host_row(name, events, storm, minutes * 60) for name, events in logs.items()]
    return figures, rows


def _host_row(name: str, events: list[log.Event], storm: Storm, seconds: float) -> dict[str, Any]:
    found = log.rounds(events)
    samples = storm.samples.get(name, [])
    last = samples[-1:]
    return {
        "name": f"host {name}",
        "rounds": len(found),
        "decided": sum(e["outcome"] == "decided" for e in found),
        "included": sum(e["included"] is True for e in found),
        "rss_mb": round(last[0].rss_bytes / 1e6, 1) if last else 0.0,
        "descriptors": last[0].descriptors if last else 0,
        "threads": last[0].threads if last else 0,
        "held": checks.held(samples, seconds),
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
