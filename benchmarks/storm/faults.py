"""The faults of a storm, by the clock, and what is seen of the hosts meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.harness import ROOT
from benchmarks.storm import checks
from benchmarks.storm.checks import Excuse, Sample
from benchmarks.wan import events as log
from benchmarks.wan.processes import Command
from benchmarks.wan.runner import PORT, SwarmOnBed
from node.commands.demo_swarm import descendants

ORPHAN_S = 20.0  # p2pd ends by itself 10 s after its last client is gone
SAMPLE_EVERY_S = 3.0
LIAR = ROOT / "tests" / "support" / "liar.py"
Say = Callable[[str], None]


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
        for pid in checks.children_of(self.pid(name), kind):
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
                taken = checks.sample(command.process.pid, now_s - self.began_s)
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
            for pid in checks.alive(grave[2]):
                self.orphans.append(f"{pid} of {grave[1]}: {checks.words(pid)}")

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


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
