"""How long from `blockswarm join` to the first step of training, where the time goes, and memory.

On loopback, with the `tiny` preset: a seed that does not train, then a newcomer whose command is
timed from its start until its first step is heard of. The phases are the newcomer's own marks
(`node.machine.phases`): python (the interpreter and our command line), libraries (hivemind and
torch), run_file (p2pd for the question, and the answer), p2pd (its own, and the host's modules),
dht, block (clocks, and which block), trainer (what is left of the training process' start: it was
begun first, beside all the others), first_step. Catching up with the consensus goes on beside
training.

Memory: the newcomer's processes together at their peak against what `join` says before it starts.
Anonymous and shared pages as they are divided among its processes, and file pages as many as the
process with the most has: the sum does not depend on who else on the machine has torch loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from node.commands.demo_swarm import descendants
from swarm.cost import worker_memory_bytes
from swarm.run_template import emit, preset

REPEATS = 5
LIMIT_S = 180.0
MEMORY_ROUNDS = 2
PHASES = ("python", "libraries", "run_file", "p2pd", "dht", "block", "trainer", "first_step")
_ADDRESS = re.compile(r"blockswarm join (/ip4/\S+)")


def run(quick: bool) -> tuple[harness.Figures, harness.Rows]:
    with tempfile.TemporaryDirectory() as name, _seed(Path(name)) as (folder, address):
        rows = [
            join_row(folder, address, number, last=number == (1 if quick else REPEATS))
            for number in range(1, 2 if quick else REPEATS + 1)
        ]
    seconds = [row["seconds_to_first_step"] for row in rows]
    figures = {
        "seconds_to_first_step": statistics.median(seconds),
        "seconds_to_first_step_worst": max(seconds),
    }
    for phase in PHASES:
        figures[f"seconds_{phase}"] = statistics.median(row[phase] for row in rows)
    said, peak = rows[-1].pop("said_gb"), rows[-1].pop("peak_gb")
    memory = {"name": "memory", "said_gb": said, "peak_gb": peak, "ratio": said / peak}
    figures |= {"memory_said_gb": said, "memory_peak_gb": peak, "memory_ratio": said / peak}
    return figures, [*rows, memory]


@contextlib.contextmanager
def _seed(folder: Path) -> Iterator[tuple[Path, str]]:
    (folder / "run.toml").write_bytes(emit(preset("tiny", "join time")))
    with _command("seed", folder / "run.toml", "--no-train", "--folder", folder / "seed") as seed:
        assert seed.stderr is not None
        for line in seed.stderr:
            if found := _ADDRESS.search(line):
                yield folder, found[1]
                return
        raise RuntimeError("the seed did not start")


@contextlib.contextmanager
def _command(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    line = [sys.executable, "-m", "node.cli", *map(str, arguments), "--listen", "127.0.0.1"]
    process = subprocess.Popen(
        [*line, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=15)
        for pid in (process.pid, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def join_row(folder: Path, address: str, number: int, last: bool) -> dict[str, Any]:
    """One newcomer; the last one is left to train for its memory."""
    began_s = time.monotonic()
    with _command("join", address, "--folder", folder / f"host-{number}", "--block", 2) as host:
        event = _first(host, lambda e: e.get("what") == "first_step", began_s)
        seconds = time.monotonic() - began_s
        phases = {phase: float(event["facts"].get(phase, 0.0)) for phase in PHASES}
        row = {"name": f"join {number}", "seconds_to_first_step": round(seconds, 3), **phases}
        if last:
            peak = 0.0
            rounds = 0
            while rounds < MEMORY_ROUNDS:
                event = _first(host, lambda e: True, began_s)
                rounds += event["kind"] == "round"
                peak = max(peak, memory_bytes(host.pid))
            row |= {
                "said_gb": worker_memory_bytes(preset("tiny", "x"), 2) / 1e9,
                "peak_gb": peak / 1e9,
            }
    return row


def _first(host: subprocess.Popen[str], wanted: Any, began_s: float) -> dict[str, Any]:
    assert host.stdout is not None
    for line in host.stdout:
        event: dict[str, Any] = json.loads(line)
        if wanted(event):
            return event
        if time.monotonic() - began_s > LIMIT_S:
            break
    raise RuntimeError("the host did not begin to train")


def memory_bytes(pid: int) -> float:
    """Of a process and those that it started, at the peak of each."""
    anonymous, files = 0, [0]
    for one in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):
            rollup = _kilobytes(Path(f"/proc/{one}/smaps_rollup"))
            status = _kilobytes(Path(f"/proc/{one}/status"))
            over_now = max(0, status["VmHWM"] - status["VmRSS"])  # what it once had beyond that
            anonymous += rollup["Pss_Anon"] + rollup["Pss_Shmem"] + over_now
            files.append(status["RssFile"])
    return (anonymous + max(files)) * 1024


def _kilobytes(path: Path) -> dict[str, int]:
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            found[name] = int(rest.split()[0])
    return found


def main() -> None:
    harness.main("join_time", run, seeds=[0])


if __name__ == "__main__":
    main()
