"""A storm on the emulated WAN: hosts and daemons are killed, stopped, cut off, lied to; what holds?

Seven hosts train two blocks, only with `blockswarm seed` and `join`. In five minutes come kill -9
of a node, of its p2pd, of its trainer and of all at once, SIGSTOP of 20 s, a partition, the death
of the seed, a liar and a newcomer that joins through an ordinary host. Throughout:

    hangs                 silences of a host that was up, longer than three rounds, and hosts that
                          did not leave within 20 s
    digest_disagreements  stretches of more than three rounds in which connected honest replicas
                          of a block stood on different digests
    lost_rounds           the most that a host's consensus ever fell back by
    orphans               processes of a killed host that live on, or that outlive a host which left
    memory_growth_percent of the host that grew most, from when it had settled to the end

`--quick`: three faults in a minute.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness, storm_checks
from benchmarks import three_hosts_events as log
from benchmarks.storm_checks import Excuse, Sample
from benchmarks.three_hosts_swarm import run_start_s
from benchmarks.wan import namespaces
from benchmarks.wan.bed import LEAVE_S, Bed
from benchmarks.wan.processes import START_S, Command
from benchmarks.wan.runner import PORT, SwarmOnBed
from node.commands.demo_swarm import descendants
from swarm.run import ModelShape, Run, Training, usual_learning_rate
from swarm.run_template import emit
from swarm.runfile import DataRules, ExchangeRules, RoundSchedule, RunFile

PERIOD_S = 5.0
ORPHAN_S = 20.0  # p2pd ends by itself 10 s after its last client is gone
SAMPLE_EVERY_S = 3.0
MINUTES, QUICK_MINUTES = 5.0, 1.0
MUST_BE_NONE = ("hangs", "lost_rounds", "digest_disagreements", "orphans", "lies_counted")
LIAR = Path(__file__).resolve().parent.parent / "tests" / "support" / "liar.py"
HOSTS = ("seed", "ann", "bob", "cem", "dia", "eve", "fay")
QUICK_HOSTS = HOSTS[:4]
Say = Callable[[str], None]


def storm_run(rounds: int) -> RunFile:
    """As small as a run can be that still learns within minutes."""
    shape = ModelShape(blocks=2, layers=1, width=32, heads=2, context=64)
    steps = rounds * 10
    training = Training(
        steps=steps,
        steps_per_round=10,
        batch=4,
        learning_rate=usual_learning_rate(steps),
        warmup_steps=20,
    )
    schedule = RoundSchedule(0, PERIOD_S, rounds, 0.5, 1.5, 0.5, 0.6)
    exchange = ExchangeRules("topk:0.05:2:overall", snapshot_every=8, min_replicas=1)
    return RunFile(
        "storm", Run(shape, training=training), DataRules("python", ""), schedule, exchange
    )


def topology(names: tuple[str, ...]) -> str:
    """Ordinary hosts, and two that come later: one lies, one is a newcomer."""
    parts = ['name = "storm"\n[wan]\nrtt_ms = 60\njitter_ms = 2\n']
    for place, name in enumerate((*names, "liar", "new"), 1):
        role = "none" if name in ("liar", "new") else "seed" if name == "seed" else "join"
        parts.append(
            f'[[hosts]]\nname = "{name}"\naddress = "11.{place}.0.1"\nrole = "{role}"\n'
            'options = ["--block", "{block}"]\n'
        )
    return "".join([*parts, '[swarm]\nrun_file = "run.toml"\n'])


@dataclass
class Storm:
    """A swarm in trouble. Every fault is a method that a schedule calls by the clock."""

    swarm: SwarmOnBed
    say: Say
    began_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    excuses: list[Excuse] = field(default_factory=list)
    apart: list[tuple[float, float]] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    down_since: dict[str, float] = field(default_factory=dict)
    graves: list[tuple[float, str, list[int]]] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    disturbed: set[str] = field(default_factory=set)
    stayed: list[str] = field(default_factory=list)

    def command(self, name: str) -> Command:
        return self.swarm.commands[name, 0]

    def pid(self, name: str) -> int:
        return self.command(name).process.pid

    def _fault(self, words: str) -> None:
        self.faults.append(f"{time.time() - self.began_s:.0f} s: {words}")
        self.say(self.faults[-1])

    # --- faults ---------------------------------------------------------------------------------

    def kill_node(self, name: str, whole: bool = False) -> None:
        """kill -9 of the node, its children being left to notice; or of all of it at once."""
        self._fault(f"kill -9 of {'all of' if whole else 'the node of'} {name}")
        children = descendants(self.pid(name))
        for pid in (self.pid(name), *(children if whole else ())):
            _signal(pid, signal.SIGKILL)
        self.command(name).process.wait()
        self.disturbed.add(name)
        self.down_since[name] = time.time()
        self.graves.append((time.time() + ORPHAN_S, name, children))

    def again(self, name: str) -> None:
        """The same command in the same folder. Excused until it has had time to start."""
        host = self.swarm.bed.topology.host(name)
        place = [key for key, _ in self.swarm.commands].index(name)
        block = place % 2
        options = ["join", self.address("bob"), "--block", block]
        self.swarm.commands[name, 0] = self._start(host.name, options)
        self.say(f"{time.time() - self.began_s:.0f} s: {name} is started again")

    def kill_child(self, name: str, kind: str) -> None:
        self._fault(f"kill -9 of the {kind} of {name}")
        self.disturbed.add(name)
        for pid in storm_checks.children_of(self.pid(name), kind):
            _signal(pid, signal.SIGKILL)

    def stop(self, name: str) -> None:
        self._fault(f"SIGSTOP of {name}")
        self.down_since[name] = time.time()
        for pid in (self.pid(name), *descendants(self.pid(name))):
            _signal(pid, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        for pid in (self.pid(name), *descendants(self.pid(name))):
            _signal(pid, signal.SIGCONT)
        self.excuses.append(Excuse(name, self.down_since.pop(name), time.time()))

    def cut(self, *names: str) -> None:
        self._fault(f"{', '.join(names)} cut off")
        self.swarm.bed.cut(names)
        self.apart.append((time.time(), float("inf")))

    def heal(self) -> None:
        self.swarm.bed.heal()
        self.apart[-1] = (self.apart[-1][0], time.time())
        self.say(f"{time.time() - self.began_s:.0f} s: healed")

    def lie(self) -> None:
        self._fault("a liar joins")
        options: list[object] = ["join", self.address("bob"), "--block", 0]
        self.swarm.commands["liar", 0] = self._start("liar", options, [str(LIAR), "scale"])

    def newcomer(self) -> None:
        self._fault("a newcomer joins through an ordinary host")
        self.down_since["new"] = time.time()
        self.swarm.commands["new", 0] = self._start(
            "new", ["join", self.address("bob"), "--block", 1]
        )

    def address(self, name: str) -> str:
        """How to join through a host that is no seed."""
        return self.command(name).address(self.swarm.bed.topology.host(name).address)

    def _start(self, name: str, what: list[object], program: list[str] | None = None) -> Command:
        folder = self.swarm.folder / f"{name}-0"
        options = [*what, "--folder", folder, "--port", PORT, "--json", "--threads", 1]
        return Command(self.swarm.bed, name, folder, options, program)

    # --- watching -------------------------------------------------------------------------------

    def look(self) -> None:
        """Samples of who is up; orphans of who is not; who has come back."""
        now_s = time.time()
        for (name, _), command in self.swarm.commands.items():
            if command.process.poll() is None and name not in self.down_since:
                taken = storm_checks.sample(command.process.pid, now_s - self.began_s)
                self.samples.setdefault(name, []).append(taken)
        for name, since_s in list(self.down_since.items()):
            events = log.read(self.swarm.folder / f"{name}-0")
            back = [
                e["time_s"]
                for e in events
                if e["time_s"] > since_s and e.get("what") in ("resumed", "started")
            ]
            if back:
                del self.down_since[name]
                self.excuses.append(Excuse(name, since_s, back[-1]))
        for grave in [g for g in self.graves if g[0] <= now_s]:
            self.graves.remove(grave)
            for pid in storm_checks.alive(grave[2]):
                self.orphans.append(f"{pid} of {grave[1]}: {storm_checks.words(pid)}")

    def weather(self, schedule: list[tuple[float, Callable[[], None]]], seconds: float) -> None:
        self.began_s = time.time()
        todo = sorted(schedule, key=lambda entry: entry[0])
        looked_s = 0.0
        while (at_s := time.time() - self.began_s) < seconds:
            while todo and todo[0][0] <= at_s:
                todo.pop(0)[1]()
            if at_s - looked_s >= SAMPLE_EVERY_S:
                looked_s = at_s
                self.look()
            # The clock of the storm: faults come at their times.
            time.sleep(0.1)

    def finish(self) -> float:
        """The storm is over: what is still down is excused. When it ended."""
        end_s = time.time()
        self.look()
        for name, since_s in self.down_since.items():
            self.excuses.append(Excuse(name, since_s, end_s))
        return end_s


def schedule_of(storm: Storm, quick: bool) -> list[tuple[float, Callable[[], None]]]:
    """Times in seconds after all train."""
    s = storm
    if quick:
        return [
            (8, lambda: s.kill_child("bob", "p2pd")),
            (16, lambda: s.kill_node("ann")),
            (20, lambda: s.again("ann")),
            (30, lambda: s.stop("cem")),
            (40, lambda: s.go_on("cem")),
        ]
    return [
        (15, lambda: s.kill_node("ann")),
        (30, lambda: s.again("ann")),
        (60, lambda: s.kill_child("bob", "p2pd")),
        (85, lambda: s.stop("cem")),
        (105, lambda: s.go_on("cem")),
        (130, lambda: s.cut("dia", "eve")),
        (155, s.heal),
        (180, lambda: s.kill_node("seed", whole=True)),
        (190, s.lie),
        (200, s.newcomer),
        (225, lambda: s.kill_child("bob", "trainer")),
        (245, lambda: s.kill_node("eve", whole=True)),
        (250, lambda: s.again("eve")),
    ]


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
        f"{pid} of {host.name} after the end: {storm_checks.words(pid)}"
        for host in bed.topology.hosts
        for pid in storm_checks.alive(namespaces.pids(bed.namespace(host.name)))
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
    hangs = storm_checks.hangs(logs, storm.excuses, PERIOD_S, (storm.began_s, end_s))
    hangs += [(name, end_s - storm.began_s, LEAVE_S) for name in storm.stayed]
    split = storm_checks.disagreements(in_storm, apart)
    calm = {k: v for k, v in storm.samples.items() if k not in (*storm.disturbed, "liar", "new")}
    ce_first, ce_last = storm_checks.ce_ends(logs)
    counted, seen = storm_checks.left_out(logs, storm_checks.of_peer(liar)) if liar else (0, 0)
    figures: harness.Figures = {
        "minutes": minutes,
        "faults": len(storm.faults),
        "hangs": len(hangs),
        "lost_rounds": storm_checks.lost_rounds(in_storm),
        "undecided_rounds": storm_checks.undecided_rounds(in_storm, ended - 2),
        "digest_disagreements": len(split),
        "orphans": len(storm.orphans),
        **storm_checks.growth(calm, minutes * 60),
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
            "stands": storm_checks.stands(in_storm, block, range(first - 1, first + length + 1)),
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
        "held": storm_checks.held(samples, seconds),
    }


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    with namespaces.or_skipped():
        namespaces.check_rights()
    namespaces.clean_stale()
    harness.main("storm", run, seeds=[0])


if __name__ == "__main__":
    main()
