"""Real swarms of real processes for tests: start hosts, wait for what they say, leave none behind.

Every host is a `blockswarm seed` or `blockswarm join` with its own p2pd on 127.0.0.1. Tests wait
for lines and events, never for a time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from node.machine.child_process import leave_with_parent
from swarm.run import ModelShape
from swarm.run_template import emit, preset
from swarm.runfile import ExchangeRules, RoundSchedule, RunFile

T = TypeVar("T")
Event = dict[str, Any]

START_LIMIT_S = 120.0  # a loaded machine takes tens of seconds to import torch in four processes
LEAVE_S = 20.0
BLOCKSWARM = ("-m", "node.cli")
LIAR = (str(Path(__file__).with_name("liar.py")),)
_ADDRESS = re.compile(r"blockswarm join (/ip4/127\.0\.0\.1/\S+)")


def tiny_run_file(
    blocks: int = 2,
    period_s: float = 4.0,
    count: int = 500,
    steps_per_round: int = 4,
    seed: int = 0,
    **shape: Any,
) -> RunFile:
    """A run so small that its training is no load: the exchange is what is tested."""
    base = preset("tiny", "live test", seed)
    model = ModelShape(
        **{"blocks": blocks, "layers": 1, "width": 32, "heads": 2, "context": 64, **shape}
    )
    training = replace(
        base.run.training,
        steps=count * steps_per_round,
        steps_per_round=steps_per_round,
        batch=4,
        warmup_steps=4,
        learning_rate=2e-3,
    )
    run = replace(base.run, model=model, training=training)
    rounds = RoundSchedule(0, period_s, count, 0.3, period_s - 2.5, 0.5, 0.5)
    exchange = ExchangeRules("topk:0.1:4:overall", snapshot_every=max(16, blocks), min_replicas=2)
    return replace(base, run=run, rounds=rounds, exchange=exchange)


class Process:
    """A command of ours as a child process; both of its streams are read as they come."""

    def __init__(self, *arguments: object, program: Sequence[str] = BLOCKSWARM) -> None:
        command = [sys.executable, *program, *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self.child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # a group of its own: to be sure that none of it is left
            preexec_fn=leave_with_parent,  # also when a time limit kills the tests
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=_collect, args=(stream, lines), daemon=True)
            for stream, lines in ((self.child.stdout, self.out), (self.child.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def running(self) -> bool:
        return self.child.poll() is None

    def events(self, kind: str | None = None) -> list[Event]:
        """The JSON lines on its standard output, all or those of one kind."""
        found = []
        for line in list(self.out):
            with suppress(ValueError):
                event = json.loads(line)
                if kind is None or kind in (event.get("kind"), event.get("event")):
                    found.append(event)
        return found

    def until(self, condition: Callable[[], T | None], limit_s: float = START_LIMIT_S) -> T:
        """Wait for a condition on what the process has said; fail if it ends before."""
        end_s = time.monotonic() + limit_s
        while True:
            ended = not self.running
            found = condition()
            if found:
                return found
            if ended or time.monotonic() > end_s:
                how = f"ended with {self.child.returncode}" if ended else "took too long"
                raise AssertionError(f"{how}\n" + "".join(self.err[-30:]))
            time.sleep(0.05)  # between two looks

    def address(self, limit_s: float = START_LIMIT_S) -> str:
        """Where others join through this host."""

        def find() -> str | None:
            return next((m[1] for line in list(self.err) if (m := _ADDRESS.search(line))), None)

        return self.until(find, limit_s)

    def until_round(self, number: int, limit_s: float = START_LIMIT_S) -> Event:
        """Wait until its consensus is that of a round, or a later one."""

        def find() -> Event | None:
            rounds = (e for e in self.events() if e.get("consensus_round", -2) >= number)
            return next(rounds, None)

        return self.until(find, limit_s)

    def members(self) -> dict[str, int]:
        """Its own children by what they are: `p2pd` and `trainer`, those that are there."""
        return {kind: pid for pid, kind in children(self.pid).items() if kind}

    def crash(self) -> None:
        """kill -9 of the node alone: its p2pd and its trainer have to notice by themselves."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.child.wait(LEAVE_S)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.child.send_signal(number)

    def kill(self) -> None:
        """kill -9, as a machine that loses power: nothing is said to anybody."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._finish()

    def wait(self, limit_s: float = START_LIMIT_S) -> int:
        code = self.child.wait(limit_s)
        self._finish()
        return code

    def leave(self) -> int:
        """Ask it to leave, as Ctrl-C does; its exit code."""
        self.signal(signal.SIGINT)
        try:
            return self.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def _finish(self) -> None:
        self.child.wait(LEAVE_S)
        for reader in self._readers:
            reader.join(LEAVE_S)
        for stream in (self.child.stdout, self.child.stderr):
            if stream is not None and not any(r.is_alive() for r in self._readers):
                stream.close()


def _collect(stream: Any, lines: list[str]) -> None:
    with suppress(ValueError):  # closed while it was read
        lines.extend(iter(stream.readline, ""))


class LiveSwarm:
    """Hosts of one run in one folder."""

    def __init__(self, folder: Path, run_file: RunFile) -> None:
        self.folder, self.run_file = folder, run_file
        self.processes: list[Process] = []
        (folder / "run.toml").write_bytes(emit(run_file))

    def start(self, *arguments: object, program: Sequence[str] = BLOCKSWARM) -> Process:
        process = Process(*arguments, program=program)
        self.processes.append(process)
        return process

    def seed(self, block: int | None = 0, *more: object) -> Process:
        return self.start("seed", self.folder / "run.toml", *self._options("seed", block), *more)

    def join(self, address: str, name: str, block: int | None = None, *more: object) -> Process:
        """Another host; the same `name` again is the same host, with its identity and state."""
        return self.start("join", address, *self._options(name, block), *more)

    def liar(self, address: str, name: str, block: int, lie: str) -> Process:
        """A host that falsifies its updates (tests/liar.py)."""
        options = self._options(name, block)
        return self.start(lie, "join", address, *options, program=LIAR)

    def _options(self, name: str, block: int | None) -> list[object]:
        chosen = [] if block is None else ["--block", block]
        folder = ["--folder", self.folder / name]
        return [*folder, "--listen", "127.0.0.1", "--threads", "1", "--json", *chosen]

    def stop(self) -> None:
        """End all of them: kindly first, all at the same time."""
        for process in self.processes:
            if process.running:
                process.signal(signal.SIGTERM)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.child.wait(LEAVE_S)
            process.kill()


def children(pid: int) -> dict[int, str]:
    """The living children of a process, and what they are ("" for others)."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            _, _, rest = (entry / "stat").read_text().rpartition(")")
            state, parent = rest.split()[:2]
            if entry.name.isdigit() and int(parent) == pid and state != "Z":
                command = (entry / "cmdline").read_bytes()
                kinds = {"p2pd": b"p2pd", "trainer": b"spawn_main"}
                kind = next((k for k, mark in kinds.items() if mark in command), "")
                found[int(entry.name)] = kind
    return found


def consensus_by_round(process: Process) -> dict[int, str]:
    """Round -> the digest that the process had as the consensus of that round."""
    return {e["consensus_round"]: e["consensus"] for e in process.events("round")}


def agree_after(processes: list[Process], number: int, rounds: int, limit_s: float) -> list[int]:
    """Wait until so many rounds after `number` are the same on all; fails if they never are."""

    def agreed() -> list[int] | None:
        seen = [consensus_by_round(p) for p in processes]
        common = set.intersection(*(set(s) for s in seen))
        same = sorted(n for n in common if n > number and len({s[n] for s in seen}) == 1)
        return same if len(same) >= rounds else None

    try:
        return processes[0].until(agreed, limit_s)
    except AssertionError as error:
        lines = [f"{p.pid}: {consensus_by_round(p)} running {p.running}" for p in processes]
        raise AssertionError("\n".join([str(error), *lines])) from None


def differing(processes: list[Process], after: int = -1) -> list[int]:
    """Rounds after `after` that two processes call by different digests."""
    seen = [consensus_by_round(p) for p in processes]
    rounds = set.union(*(set(s) for s in seen))
    return sorted(n for n in rounds if n > after and len({s[n] for s in seen if n in s}) > 1)


@contextmanager
def live_swarm(folder: Path, run_file: RunFile | None = None) -> Iterator[LiveSwarm]:
    swarm = LiveSwarm(folder, run_file or tiny_run_file())
    try:
        yield swarm
    finally:
        swarm.stop()
