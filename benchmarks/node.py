"""A live node while its trainer trains: how late its event loop is, what the network costs, memory.

Real hosts on loopback: the measured one, another replica of its block, and a host of the block that
it looks ahead to. The measured host runs in a process of this file, as `blockswarm join` would run
it, with a probe on its event loop. All of it (node, p2pd, trainer) is held to one core, the others
to another, so the network takes its time from the trainer and nothing is hidden by an idle core.

    loop lag    a tick every 5 ms: by how much it was late. A stall of 100 ms counts as all the
                ticks that it swallowed, not as one.
    speed kept  training steps per second with the network on, against the same trainer process
                alone on the same core, with the trainers of the other hosts, and nothing else, on
                theirs. Taken in turns; the ratio is that of the medians. The cap on steps in a
                round is lifted, so that the trainer never idles.
    memory      the sum of PSS (shared pages counted once) over the node's processes at its peak,
                through several rounds: weights, optimizer, copies of other blocks, consensus, error
                feedback and snapshots, Python and torch twice, p2pd. Against the peak of a process
                that trains the whole model end to end, with its Python and torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.reference import ReferenceWorker
from node.trainer.process import TrainerSettings
from node.trainer.trainer import Trainer
from swarm.run import ModelShape
from swarm.run_template import emit, preset
from swarm.runfile import RoundSchedule, parse, run_id, with_start

TICK_S = 0.005
SAMPLE_MEMORY_S = 1.0  # a look at all pages of three processes takes some 20 ms
CORES = sorted(os.sched_getaffinity(0))  # the first for what is measured, the last for the rest
WARM_ROUNDS = 2  # decided ones, before anything counts: by then the hosts know each other
LIMIT_S = 600.0
UNCAPPED_STEPS = 5000
SHAPES = {
    "1.6M": ModelShape(),
    "25M": ModelShape(width=512, heads=8),
    "100M": ModelShape(width=768, heads=12, layers=4),
}


def run_text(shape: ModelShape, batch: int, schedule: RoundSchedule) -> bytes:
    base = preset("tiny", "node benchmark")
    steps = schedule.count * UNCAPPED_STEPS
    training = replace(base.run.training, steps=steps, steps_per_round=UNCAPPED_STEPS, batch=batch)
    whole = replace(base, run=replace(base.run, model=shape, training=training), rounds=schedule)
    return with_start(emit(whole), int(time.time()))


def trainer_settings(text: bytes, block: int) -> TrainerSettings:
    run_file = parse(text)
    return TrainerSettings(run_file.run.to_dict(), block, run_file.data.spec, "alone", "cpu", 1)


# --- inside the processes


class Steps:
    """Training steps as they are reported; speed between the first and the last report."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def hear(self, progress: dict[str, Any]) -> None:
        self.seen.append((time.monotonic(), progress["steps"]))

    def per_s(self, since_s: float) -> float:
        seen = [point for point in self.seen if point[0] >= since_s]
        (first_s, first), (last_s, last) = seen[0], seen[-1]
        return (last - first) / (last_s - first_s)


class Probe:
    """How late the event loop is."""

    def __init__(self) -> None:
        self.late_s: list[float] = []

    async def run(self) -> None:
        due = time.monotonic()  # the loop's own clock has whole milliseconds
        while True:
            due += TICK_S
            await asyncio.sleep(due - time.monotonic())
            late = max(time.monotonic() - due, 0.0)
            while late > TICK_S:  # the ticks that should have been meanwhile
                self.late_s.append(late)
                late -= TICK_S
                due += TICK_S
            self.late_s.append(late)


async def live_host(told: dict[str, Any]) -> None:
    """A host; if it is the measured one, the figures of `seconds` after its first rounds."""
    from node.host.host import Host
    from node.host.settings import HostSettings
    from node.network.daemon import DaemonSettings
    from node.network.network import NetworkSettings

    text, folder = bytes.fromhex(told["run"]), Path(told["folder"])
    daemon = DaemonSettings(folder / "identity", hosts=("127.0.0.1",), map_port=False)
    network = NetworkSettings(daemon, run_id(text), text, tuple(told["join"]), state_folder=folder)
    is_seed = not told["join"]
    host = Host(
        HostSettings(network, folder, block=told["block"], device="cpu", threads=1, seed=is_seed),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    running = asyncio.create_task(host.run())
    await until(lambda: host.work is not None and host.work.training.trainer.pid, running)
    answer({"join": await host.network.invitations()})
    if told["seconds"]:
        await until(lambda: shared_rounds(host) >= WARM_ROUNDS, running)
        answer(await measure_host(host, told["seconds"]))
    await asyncio.to_thread(sys.stdin.read)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def measure_host(host: Any, seconds: float) -> dict[str, Any]:
    steps, probe, trainer = Steps(), Probe(), host.work.training.trainer
    heard = trainer.on_progress

    def on_progress(progress: dict[str, Any]) -> None:
        heard(progress)
        steps.hear(progress)

    trainer.on_progress = on_progress
    began_s, before = time.monotonic(), host.work.replica.state.log.head.round
    probing = asyncio.create_task(probe.run())
    await asyncio.sleep(seconds)  # what is measured is what happens meanwhile
    probing.cancel()
    late_ms = sorted(1000 * late for late in probe.late_s)
    return {
        "steps_per_s": steps.per_s(began_s),
        "rounds": host.work.replica.state.log.head.round - before,
        "contributors": len(host.work.replica.state.log.head.contributions),
        "lag_p50_ms": late_ms[len(late_ms) // 2],
        "lag_p99_ms": late_ms[int(0.99 * len(late_ms))],
        "lag_max_ms": late_ms[-1],
    }


def shared_rounds(host: Any) -> int:
    """Rounds of the log in which this host and another one had an update."""
    if host.work is None:
        return 0
    entries = host.work.replica.state.log.entries
    mine = [{part.sender for part in entry.contributions} for entry in entries]
    return sum(host.me in senders and len(senders) > 1 for senders in mine)


async def until(condition: Any, running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            if running.done():
                running.result()
            await asyncio.sleep(0.05)  # between two looks


async def lone_trainer(told: dict[str, Any]) -> None:
    """The same training process, with nothing beside it."""
    steps = Steps()
    text = bytes.fromhex(told["run"])
    trainer = Trainer(trainer_settings(text, told["block"]), steps.hear, lambda: None)
    await trainer.start()
    await trainer.begin_round(0, 10**9)
    await asyncio.sleep(told["warm_s"])  # the first steps are slower
    began_s = time.monotonic()
    await asyncio.sleep(told["seconds"])  # its steps meanwhile are counted
    answer({"steps_per_s": steps.per_s(began_s)})
    await trainer.stop()


def end_to_end(told: dict[str, Any]) -> None:
    """Training of the whole model in one process."""
    torch.set_num_threads(1)
    run = parse(bytes.fromhex(told["run"])).run
    worker = ReferenceWorker(run, torch.device("cpu"))
    batch, context = run.training.batch, run.model.context
    text = torch.randint(256, (batch, context + 1), generator=torch.Generator().manual_seed(0))
    for _ in range(told["steps"]):
        worker.step(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    answer({})
    sys.stdin.read()


def answer(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


# --- outside


class Child:
    """A process of this file, held to some cores, and the peak of its memory."""

    def __init__(self, role: str, told: dict[str, Any], cores: set[int]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.node", role, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            cwd=harness.ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self.peak_bytes = 0

    async def hear(self) -> dict[str, Any]:
        """Its next answer; its memory is watched meanwhile."""
        assert self.process.stdout is not None
        reading = asyncio.create_task(asyncio.to_thread(self.process.stdout.readline))
        while not reading.done():
            await asyncio.wait([reading], timeout=SAMPLE_MEMORY_S)
            self.peak_bytes = max(self.peak_bytes, pss_bytes(self.process.pid))
        line = reading.result()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(self.errors.read()[-3000:].decode(errors="replace"))
        heard: dict[str, Any] = json.loads(line)
        return heard

    async def stop(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            await asyncio.to_thread(self.process.wait, 15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def pss_bytes(pid: int) -> int:
    """PSS of a process and all below it."""
    total, waiting = 0, [pid]
    while waiting:
        each = waiting.pop()
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
            for task in Path(f"/proc/{each}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return total


@contextlib.asynccontextmanager
async def swarm(
    folder: Path, text: bytes, block: int, seconds: float
) -> AsyncIterator[tuple[Child, list[Child]]]:
    """The measured host, and the others, who are there first."""
    facts = {"run": text.hex(), "seconds": 0.0}
    children: list[Child] = []

    def start(name: str, its_block: int, join: list[str], seconds: float, core: int) -> Child:
        (folder / name).mkdir()
        told = {**facts, "folder": str(folder / name), "block": its_block, "join": join}
        children.append(Child("host", {**told, "seconds": seconds}, {core}))
        return children[-1]

    try:
        replica = start("replica", block, [], 0.0, CORES[-1])
        join = (await replica.hear())["join"]
        ahead = start("ahead", block + 1, join, 0.0, CORES[-1])
        await ahead.hear()
        measured = start("measured", block, join, seconds, CORES[0])
        await measured.hear()
        yield measured, children
    finally:
        await asyncio.gather(*(child.stop() for child in children))


async def live(text: bytes, block: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bsnode") as folder:
        async with swarm(Path(folder), text, block, seconds) as (measured, _):
            found = await measured.hear()
            found["peak_mb"] = measured.peak_bytes / 1e6
            return found


async def alone(role: str, told: dict[str, Any]) -> dict[str, Any]:
    child = Child(role, told, {CORES[0]})
    try:
        found = await child.hear()
        return {**found, "peak_mb": child.peak_bytes / 1e6}
    finally:
        await child.stop()


async def without_network(told: dict[str, Any]) -> dict[str, Any]:
    """The trainer alone on its core. The trainers of the other hosts are on theirs, as in `live`:
    cores share memory and a cache, and what they take of it is not the network's doing."""
    longer = {**told, "seconds": told["seconds"] + 2 * told["warm_s"]}
    others = [Child("trainer", longer, {CORES[-1]}) for _ in range(2)]
    try:
        return await alone("trainer", told)
    finally:
        await asyncio.gather(*(child.stop() for child in others))


@dataclass(frozen=True)
class Variant:
    """A row: speed and lag in a turn with the network and one without, or memory at a size."""

    name: str
    shape: str
    seconds: float
    memory: bool = False
    quick: bool = False

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def variants(quick: bool) -> list[Variant]:
    if quick:
        return [
            Variant("live, 1.6M, 0", "1.6M", 10.0, quick=True),
            Variant("memory, 1.6M", "1.6M", 5.0, memory=True, quick=True),
        ]
    rows = [Variant(f"live, 1.6M, {repeat}", "1.6M", 36.0) for repeat in range(3)]
    rows += [
        Variant(f"memory, {shape}", shape, seconds, memory=True)
        for shape, seconds in {"1.6M": 36.0, "25M": 90.0, "100M": 90.0}.items()
    ]
    return rows


def measure(variant: Variant) -> dict[str, Any]:
    os.sched_setaffinity(0, {CORES[-1]})
    return asyncio.run(memory_row(variant) if variant.memory else speed_row(variant))


async def speed_row(variant: Variant) -> dict[str, Any]:
    """The trainer without the network, then in a live host."""
    schedule = RoundSchedule(0, 12.0, 400, 1.0, 4.0, 1.0, 1.5)
    if variant.quick:
        schedule = RoundSchedule(0, 5.0, 400, 0.5, 2.0, 0.5, 0.5)
    shape = SHAPES[variant.shape]
    text, block = run_text(shape, 8, schedule), shape.blocks - 2
    told = {"run": text.hex(), "block": block, "seconds": variant.seconds, "warm_s": 3.0}
    off = await without_network(told)
    on = await live(text, block, variant.seconds)
    return {
        "shape": variant.shape,
        "steps_per_s_alone": round(off["steps_per_s"], 3),
        "steps_per_s_live": round(on["steps_per_s"], 3),
        **{key: round(value, 3) for key, value in on.items() if key != "steps_per_s"},
    }


async def memory_row(variant: Variant) -> dict[str, Any]:
    """Live against end-to-end at one size. The batch is footprint's."""
    shape, batch = SHAPES[variant.shape], {"1.6M": 8, "25M": 8, "100M": 4}[variant.shape]
    schedule = RoundSchedule(0, 12.0, 400, 1.0, 4.0, 1.0, 1.5)
    if variant.shape != "1.6M":
        schedule = RoundSchedule(0, 40.0, 400, 2.0, 16.0, 4.0, 5.0)
    text = run_text(shape, batch, schedule)
    on = await live(text, shape.blocks - 2, variant.seconds)
    whole = await alone("end_to_end", {"run": text.hex(), "steps": 4})
    return {
        "shape": variant.shape,
        "live_peak_mb": round(on["peak_mb"], 1),
        "end_to_end_peak_mb": round(whole["peak_mb"], 1),
        "memory_ratio": round(on["peak_mb"] / whole["peak_mb"], 3),
        "lag_p99_ms": round(on["lag_p99_ms"], 2),
        "lag_max_ms": round(on["lag_max_ms"], 1),
        "rounds": on["rounds"],
    }


def figures(rows: harness.Rows) -> harness.Figures:
    speed = [row for row in rows if "steps_per_s_live" in row]
    memory = [row for row in rows if "memory_ratio" in row]
    out: harness.Figures = {}
    if speed:
        kept, alone_per_s = (
            statistics.median(row[key] for row in speed)
            for key in ("steps_per_s_live", "steps_per_s_alone")
        )
        out |= {
            "loop_lag_p99_ms": max(row["lag_p99_ms"] for row in speed),
            "training_speed_kept": kept / alone_per_s,
        }
    if memory:  # in the order of their size
        out |= {
            "memory_ratio": memory[-1]["memory_ratio"],
            "memory_ratio_smallest": memory[0]["memory_ratio"],
            "loop_lag_p99_ms_largest": memory[-1]["lag_p99_ms"],
        }
    return out


def serve_role(role: str, told: dict[str, Any]) -> None:
    from node.machine.event_loop import run_loop

    if role == "host":
        run_loop(live_host(told))
    elif role == "trainer":
        run_loop(lone_trainer(told))
    else:
        end_to_end(told)


if __name__ == "__main__":
    if sys.argv[1:2] and not sys.argv[1].startswith("-"):
        serve_role(sys.argv[1], json.loads(sys.argv[2]))
    else:
        options = harness.parse("node")
        table = variants(options.quick)
        harness.measure_rows(options, "node", table, measure, figures, {"seeds": [0]})
