"""What a block's worker costs beside end-to-end training: speed and peak memory, same threads.

Speed: one process, steps of end-to-end and of every worker alternated; the ratio of medians. For a
coupling the figure is that of the average worker; the slowest stands in the rows.
Memory: a process of its own for each; peak resident memory beyond what it had before the model
existed, so that Python and torch do not hide the difference.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import harness
from benchmarks.reference import ReferenceWorker
from node.machine.memory import keep_freed_memory
from swarm.learning.coupling import followed_blocks
from swarm.learning.moving_copy import MovingCopy
from swarm.learning.worker import BlockWorker, initial_block
from swarm.run import Coupling, ModelShape, Run

CPU = torch.device("cpu")
COUPLINGS: tuple[Coupling, ...] = ("independent", "look_ahead")

# name -> (shape, batch). The last is a 300M-parameter model; its batch is small for its time.
SHAPES = {
    "1.6M": (ModelShape(), 8),
    "25M": (ModelShape(width=512, heads=8), 8),
    "100M": (ModelShape(width=768, heads=12, layers=4), 4),
    "300M": (ModelShape(width=1024, heads=16, layers=6), 2),
}


def run(quick: bool) -> tuple[harness.Figures, harness.Rows]:
    keep_freed_memory()  # as the training process does
    torch.set_num_threads(1)
    names = ["1.6M"] if quick else list(SHAPES)
    repeats = {"1.6M": 5} if quick else {"1.6M": 31, "25M": 7}
    speed = [speed_row(name, count) for name, count in repeats.items()]
    memory = [memory_row(name, coupling) for name in names for coupling in COUPLINGS]
    by = {(row["shape"], row["coupling"]): row for row in memory}
    largest = names[-1]
    figures = {
        "speed_ratio": speed[0]["independent_ratio"],
        "memory_ratio": max(by[n, "independent"]["memory_ratio"] for n in names),
        "speed_ratio_look_ahead": speed[0]["look_ahead_ratio"],
        "speed_ratio_look_ahead_slowest": speed[0]["look_ahead_slowest_ratio"],
        "memory_ratio_look_ahead": max(by[n, "look_ahead"]["memory_ratio"] for n in names),
        "memory_ratio_largest": by[largest, "independent"]["memory_ratio"],
        "memory_ratio_look_ahead_largest": by[largest, "look_ahead"]["memory_ratio"],
    }
    return figures, [*speed, *memory, *profile_rows()]


def step_of(name: str, coupling: Coupling | None, block: int) -> Callable[[], Any]:
    """A step of end-to-end (coupling None) or of the worker of a block, ready to call."""
    shape, batch = SHAPES[name]
    text = torch.randint(
        256, (batch, shape.context + 1), generator=torch.Generator().manual_seed(0)
    )
    x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if coupling is None:
        reference = ReferenceWorker(Run(model=shape), CPU)
        return lambda: reference.step(x, y)
    whole = Run(model=replace(shape, coupling=coupling))
    worker = BlockWorker(whole, block, CPU)
    copies = {other: _moving_copy(whole, other) for other in followed_blocks(whole.model, block)}

    def step() -> None:
        for moving in copies.values():
            moving.move()
        upstream = [copies[other] for other in copies if other < block]
        worker.step(x, y, upstream, copies.get(block + 1))

    return step


def _moving_copy(run: Run, block: int) -> MovingCopy:
    """A copy on its way to a version of which the host holds the weights, as in a swarm."""
    copy = MovingCopy(initial_block(run, block), run.training.copy_steps)
    weights = [parameter.reshape(-1) for _, parameter in sorted(copy.block.named_parameters())]
    version = torch.empty(sum(map(len, weights)), dtype=torch.float16)
    for part, here in zip(weights, version.split([len(w) for w in weights]), strict=True):
        here.copy_(part)
    copy.follow_flat(version)
    return copy


def speed_row(name: str, repeats: int) -> dict[str, Any]:
    shape, batch = SHAPES[name]
    steps: dict[tuple[str, int], Callable[[], Any]] = {("end_to_end", 0): step_of(name, None, 0)}
    for coupling in COUPLINGS:
        for block in range(shape.blocks):
            steps[coupling, block] = step_of(name, coupling, block)
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for repeat in range(repeats + 1):
        for key, step in steps.items():
            began = time.process_time()
            step()
            if repeat:  # the first warms up
                seconds[key].append(time.process_time() - began)
    median = {key: statistics.median(times) for key, times in seconds.items()}
    whole = median["end_to_end", 0]
    row: dict[str, Any] = {
        "name": f"speed, {name}",
        "shape": name,
        "end_to_end_bytes_per_s": batch * shape.context / whole,
    }
    for coupling in COUPLINGS:
        each = [median[coupling, block] for block in range(shape.blocks)]
        row[f"{coupling}_bytes_per_s"] = [round(batch * shape.context / s) for s in each]
        row[f"{coupling}_ratio"] = whole / statistics.fmean(each)
        row[f"{coupling}_slowest_ratio"] = whole / max(each)
    return row


def memory_row(name: str, coupling: Coupling) -> dict[str, Any]:
    """The worker that needs the most against end-to-end, both at their peak."""
    shape = SHAPES[name][0]
    # Only the relay's last two blocks can be the largest: most copies, or copies and look-ahead.
    blocks = [0] if coupling == "independent" else [shape.blocks - 2, shape.blocks - 1]
    worker = max(peak_megabytes(name, coupling, block) for block in blocks)
    whole = peak_megabytes(name, None, 0)
    return {
        "name": f"memory, {name}, {coupling}",
        "shape": name,
        "coupling": coupling,
        "worker_peak_mb": round(worker, 1),
        "end_to_end_peak_mb": round(whole, 1),
        "memory_ratio": worker / whole,
    }


@functools.cache  # end-to-end is what every coupling stands beside: minutes for a large shape
def peak_megabytes(name: str, coupling: Coupling | None, block: int) -> float:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(send, name, coupling, block))
    process.start()
    send.close()  # so that a child that dies is an EOFError here, not a wait without end
    megabytes: float = receive.recv()
    process.join()
    return megabytes


def _measure_peak(send: Any, name: str, coupling: Coupling | None, block: int) -> None:
    keep_freed_memory()
    torch.set_num_threads(1)
    # What torch imports and allocates once, for any model: about 100 MB that both sides have.
    tiny = ModelShape(blocks=1, layers=1, width=16, heads=2, context=8)
    x = torch.zeros(1, 8, dtype=torch.long)
    BlockWorker(Run(model=tiny), 0, CPU).step(x, x, [], None)
    before = _peak_rss_mb(reset=True)
    step = step_of(name, coupling, block)
    for _ in range(2):  # the first makes the optimizer's state, the second has all of it at once
        step()
    send.send(_peak_rss_mb() - before)


def _peak_rss_mb(reset: bool = False) -> float:
    """VmHWM, the peak resident size; writing 5 to clear_refs starts the peak anew."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def profile_rows() -> harness.Rows:
    """Where the time of a look-ahead worker's step goes, by operation."""
    step = step_of("1.6M", "look_ahead", 1)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(3):
            step()
    events = sorted(recorded.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(e.self_cpu_time_total for e in events)
    return [
        {"name": f"profile, {e.key}", "share": round(e.self_cpu_time_total / total, 4)}
        for e in events[:10]
    ]


def main() -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    harness.main("footprint", run, seeds=[0])


if __name__ == "__main__":
    main()
