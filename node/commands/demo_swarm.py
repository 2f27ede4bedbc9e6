"""The demo: a real swarm on this machine, from nothing to an assembled model and a text it wrote.

A seed and six workers on four blocks, each a process of its own with its own p2pd, as strangers
would run them: only `blockswarm seed`, `join` and `assemble`. Half way one worker is killed and
another joins. Decides the small run that shows it in minutes, and that a folder which is not an
earlier demo's is left alone. All processes are gone when it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any

from node.host.home import make
from node.machine.atomic import write_atomically
from node.machine.child_process import leave_with_parent
from protocol.errors import BlockswarmError, UsageError
from swarm.events import EventError, LogEvent, NodeEvent, RoundEvent, from_line
from swarm.run import ModelShape, Run, Training
from swarm.runfile import DataRules, ExchangeRules, RoundSchedule, RunFile, parse, with_start

WORKERS = 7  # the seed, and six that join
LATECOMER = WORKERS
ROUNDS = 80
PERIOD_S = 1.5
LEAD_S = 20.0  # from the seed's start to the run's: by then the others have joined
START_S = 120.0
LEAVE_S = 12.0
ASSEMBLE_S = 240.0  # a busy machine; seconds on an idle one
EVALUATION_BYTES = 32768
SHOWN_ROUNDS = 8
REPLACED = ("run.toml", "hosts", "model", "report.html")


class DemoError(BlockswarmError):
    """The demo's swarm did not do what it should."""


def demo_run(rounds: int = ROUNDS, period_s: float = PERIOD_S) -> RunFile:
    """Small enough for 7 workers on 2 cores."""
    shape = ModelShape(blocks=4, layers=1, width=96, heads=4, context=96)
    steps_per_round = 6
    training = Training(
        steps=rounds * steps_per_round,
        steps_per_round=steps_per_round,
        warmup_steps=20,
        learning_rate=5e-3,
        replica_power=0.5,
    )
    schedule = RoundSchedule(0, period_s, rounds, 0.15, 0.5, 0.2, 0.18)
    exchange = ExchangeRules("topk:0.05:2:overall", 16, min_replicas=1, ends_density=0.5)
    return RunFile(
        "demo", Run(shape, training=training), DataRules("python", ""), schedule, exchange
    )


@dataclass
class DemoWorker:
    """One process of the swarm, and what it said."""

    name: str
    process: subprocess.Popen[str]
    events: list[LogEvent] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> list[RoundEvent]:
        return [event for event in self.events if isinstance(event, RoundEvent)]

    @property
    def training(self) -> bool:
        return any(isinstance(e, NodeEvent) and e.what == "started" for e in self.events)

    @property
    def address(self) -> str | None:
        lines = [line for line in self.said if "blockswarm join /" in line]
        return lines[0].split()[-1] if lines else None

    def listen(self) -> None:
        assert self.process.stdout is not None and self.process.stderr is not None
        for stream, hear in ((self.process.stdout, self._hear), (self.process.stderr, self._said)):
            Thread(target=_drain, args=(stream, hear), daemon=True).start()

    def _hear(self, line: str) -> None:
        with contextlib.suppress(EventError):
            self.events.append(from_line(line))

    def _said(self, line: str) -> None:
        self.said.append(line.rstrip())


def _drain(stream: Any, hear: Callable[[str], None]) -> None:
    for line in stream:
        hear(line)


class CtrlC:
    """Remembers that it was pressed. An interrupt that comes while a process is forked is raised in
    Python's own hooks, which drop it; on a busy machine that is no rare moment."""

    def __init__(self) -> None:
        self.pressed = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler or current_thread() is not main_thread():
            yield
            return
        signal.signal(signal.SIGINT, self._press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _press(self, *_: object) -> None:
        self.pressed = True
        raise KeyboardInterrupt

    def check(self) -> None:
        if self.pressed:
            raise KeyboardInterrupt


class DemoSwarm:
    """Starts workers and sees to it that none is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: list[DemoWorker] = []
        self.ctrl_c = CtrlC()

    def start(self, name: str, *arguments: str) -> DemoWorker:
        command = [sys.executable, "-m", "node.cli", *arguments, "--json", "--threads", "1"]
        command += ["--folder", str(self.folder / name), "--listen", "127.0.0.1"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=leave_with_parent,
        )
        worker = DemoWorker(name, process)
        worker.listen()
        self.workers.append(worker)
        return worker

    def until(self, condition: Callable[[], bool], what: str, within_s: float) -> None:
        """Wait for a condition; a worker that ended by itself is an error."""
        end = time.monotonic() + within_s
        while not condition():
            self.ctrl_c.check()
            for worker in self.workers:
                if worker.process.poll() not in (None, -signal.SIGKILL):
                    last = " ".join(worker.said[-3:])
                    raise DemoError(f"{worker.name} ended while waiting for {what}: {last}")
            if time.monotonic() > end:
                raise DemoError(f"{what} did not happen within {within_s:.0f} s")
            time.sleep(0.2)

    def stop(self) -> None:
        """Ask all to leave, then make them; wait for their daemons too."""
        pids = {pid for w in self.workers for pid in descendants(w.process.pid)}
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.terminate()
        end = time.monotonic() + LEAVE_S
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.1, end - time.monotonic()))
        for pid in pids | {w.process.pid for w in self.workers}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for worker in self.workers:
            worker.process.wait()


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and theirs."""
    found, todo = [], [pid]
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


@contextlib.contextmanager
def swarm_in(folder: Path) -> Iterator[DemoSwarm]:
    shutil.rmtree(folder / "hosts", ignore_errors=True)
    swarm = DemoSwarm(folder / "hosts")
    with swarm.ctrl_c.watched():
        try:
            yield swarm
        finally:
            swarm.stop()


def take_folder(folder: Path) -> None:
    """Make it, or take that of an earlier demo. What is there is replaced, so it must be ours."""
    make(folder, "-o")
    there = [name for name in REPLACED if (folder / name).exists()]
    if there and not _is_demos(folder):
        raise UsageError(
            f"{folder} has {' and '.join(there)}, which no demo wrote and this one would replace",
            "choose another folder with -o",
        )


def _is_demos(folder: Path) -> bool:
    """By its run file, which is the first thing that a demo writes."""
    try:
        found = parse((folder / "run.toml").read_bytes())
    except (OSError, UsageError):
        return False
    return found.name == "demo" and found.run.model == demo_run().run.model


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def run_demo(folder: Path, say: Callable[[str], None], run: RunFile) -> dict[str, Any]:
    """The whole story; returns its figures."""
    from swarm.run_template import emit

    began = time.monotonic()
    take_folder(folder)
    run_path = folder / "run.toml"
    text = with_start(emit(run), int(time.time() + LEAD_S))
    write_atomically(run_path, lambda half: _put(half, text))
    blocks = run.run.model.blocks
    with swarm_in(folder) as swarm:
        say(f"starting a seed and {WORKERS - 1} workers on {blocks} blocks")
        seed = swarm.start("seed", "seed", str(run_path), "--block", "0")
        swarm.until(lambda: seed.address is not None, "the seed's start", START_S)
        address = seed.address
        assert address is not None
        for number in range(1, WORKERS):
            swarm.start(f"worker-{number}", "join", address, "--block", str(number % blocks))
        swarm.until(lambda: all(w.training for w in swarm.workers), "training", START_S)
        say(f"all of them are there after {time.monotonic() - began:.0f} s")
        half = run.rounds.count // 2
        _watch(swarm, half, say)
        victim = swarm.workers[WORKERS - 1]
        say(f"round {half}: {victim.name} is killed, another worker joins")
        left = descendants(victim.process.pid)
        for pid in [victim.process.pid, *left]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        swarm.start(f"worker-{LATECOMER}", "join", address, "--block", str((WORKERS - 1) % blocks))
        _watch(swarm, run.rounds.count, say)
        model = folder / "model"
        say("assembling")
        result = assemble_demo(address, model)
        figures = _figures(swarm, result)
    figures |= {"seconds": round(time.monotonic() - began, 1), "model": str(model)}
    return figures


def _host_facts(worker: DemoWorker) -> dict[str, Any]:
    """What a host did, and what its own weights and its block's consensus came to."""
    rounds = worker.rounds
    own = [event.local_ce_nats for event in rounds if event.local_ce_nats is not None]
    consensus = [e.consensus_ce_nats for e in rounds if e.consensus_ce_nats is not None]
    return {
        "name": worker.name,
        "block": rounds[-1].block if rounds else None,
        "steps": sum(event.steps for event in rounds),
        "rounds": len(rounds),
        "own_ce_nats": own[-1] if own else None,
        "consensus_ce_nats": consensus[-1] if consensus else None,
    }


def _lag_nats(worker: DemoWorker) -> float | None:
    """How far the consensus was behind the host's own weights when both were measured last."""
    for event in reversed(worker.rounds):
        if event.local_ce_nats is not None and event.consensus_ce_nats is not None:
            return event.consensus_ce_nats - event.local_ce_nats
    return None


def _watch(swarm: DemoSwarm, until_round: int, say: Callable[[str], None]) -> None:
    """Wait until the seed has closed a round, saying how it goes on the way."""
    shown = -1

    def reached() -> bool:
        nonlocal shown
        newest = max((e.round for w in swarm.workers for e in w.rounds), default=-1)
        if newest > shown and newest % SHOWN_ROUNDS == 0:
            shown = newest
            losses = [w.rounds[-1].consensus_ce_nats for w in swarm.workers if w.rounds]
            known = [ce for ce in losses if ce is not None]
            ce = f"  blocks' CE {min(known):.2f} to {max(known):.2f}" if known else ""
            agreed = len({(e.block, e.consensus) for w in swarm.workers for e in w.rounds[-1:]})
            say(f"round {newest}{ce}  {agreed} distinct consensus states")
        return newest >= until_round - 1

    swarm.until(reached, f"round {until_round}", START_S + LEAD_S + (20 + until_round) * PERIOD_S)


def assemble_demo(address: str, model: Path) -> dict[str, Any]:
    shutil.rmtree(model, ignore_errors=True)
    command = [sys.executable, "-m", "node.cli", "assemble", address, "-o", str(model)]
    command += ["--fit", "--json", "--threads", "1", "--evaluate-bytes", str(EVALUATION_BYTES)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ASSEMBLE_S
        )
    except subprocess.TimeoutExpired:
        raise DemoError(f"the assembly took longer than {ASSEMBLE_S:.0f} s") from None
    if done.returncode:
        raise DemoError(f"the assembly failed: {done.stderr.strip()[-400:]}")
    facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


def _figures(swarm: DemoSwarm, assembled: dict[str, Any]) -> dict[str, Any]:
    """What the swarm moved, and how often updates were included."""
    by_purpose: dict[str, int] = {}
    sent = included = 0
    for worker in swarm.workers:
        for event in worker.rounds:
            sent += event.update_bytes > 0
            included += event.included is True
            for part in event.traffic:
                # Both ends count a byte; what was sent is enough.
                by_purpose[part.purpose] = by_purpose.get(part.purpose, 0) + part.sent_bytes
    lags = [lag for worker in swarm.workers if (lag := _lag_nats(worker)) is not None]
    return {
        "assembled": assembled,
        "ce_end": assembled["ce_nats"],
        "consensus_lag_nats": statistics.fmean(lags) if lags else None,
        "hosts": [_host_facts(worker) for worker in swarm.workers],
        "bytes_moved": sum(by_purpose.values()),
        "bytes_by_purpose": by_purpose,
        "updates_sent": sent,
        "updates_included": included,
        "workers": len(swarm.workers),
    }
