"""One shape of the logical-shape benchmark, served in all ways, and what its time consists of."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Figures, Rows
from benchmarks.logical_shape.bed import HOPS, LINE_MBIT, RTT_MS, Written, logical_bed
from benchmarks.logical_shape.matmul import Ways, fastest_ways
from benchmarks.logical_shape.model import BYTES_PER_PARAMETER, SHAPES

PROMPT = b"The seeds of the"


@dataclass(frozen=True)
class Variant:
    """A shape, and how much of it is measured. `timed`: bytes of autoregression."""

    name: str
    length: int  # bytes of an output
    timed: int
    repeats: int  # whole outputs; their median counts
    minutes: float  # what it takes, about

    @property
    def key(self) -> str:
        facts = {**asdict(self), **asdict(SHAPES[self.name]), "rtt_ms": RTT_MS, "version": 1}
        del facts["minutes"]
        return json.dumps(facts, sort_keys=True)


FULL = (
    Variant("0.1B", 128, 128, 5, 2),
    Variant("1B", 128, 128, 3, 3),
    Variant("7B", 128, 128, 3, 8),
    Variant("75B", 128, 5, 1, 8),
)
QUICK = (Variant("tiny", 32, 8, 2, 0.7),)


def measure(variant: Variant) -> dict[str, Any]:
    """One shape, all ways of serving it."""
    torch.set_num_threads(1)
    shape, length = SHAPES[variant.name], variant.length
    ways, gflops = fastest_ways(shape.width, len(PROMPT) + length)
    whole = variant.timed == length
    with (
        tempfile.TemporaryDirectory(prefix="blockswarm-logical-") as scratch,
        logical_bed(variant.name, ways, Path(scratch)) as bed,
    ):
        bed.write("autoregressive", PROMPT[:1], 1, 0)  # connections, and pages of the weights
        slow = bed.write("autoregressive", PROMPT, variant.timed, 1)
        _show(variant, "autoregressive", slow)
        sweeps = [bed.write("denoise", PROMPT, length, seed) for seed in range(variant.repeats)]
        _show(variant, "denoise", median_of(sweeps))
        drafted = bed.write("one-sweep", PROMPT, length, 1) if whole else None
    row = row_of(variant, ways, slow, sweeps, drafted)
    return {**row, "gflops": gflops}


def row_of(
    variant: Variant, ways: Ways, slow: Written, sweeps: Sequence[Written], drafted: Written | None
) -> dict[str, Any]:
    """All that is said of a shape. Without a drafted output it is put together from the others."""
    shape, length, sweep = SHAPES[variant.name], variant.length, median_of(sweeps)
    whole, once = extrapolated(slow, length), split(sweep)
    draft = split(drafted) if drafted is not None else drafted_from(slow, sweep, length)
    return {
        "parameters": shape.parameters,
        "logical_gb": shape.parameters * BYTES_PER_PARAMETER / 1e9,
        "shape": f"3 x {shape.layers} x {shape.width}",
        "physical_layers": shape.physical,
        "physical_gb_per_host": shape.physical_bytes / 1e9,
        "length": length,
        "matmul_token": ways.few,
        "matmul_sweep": ways.many,
        **_named("", once),
        "hosts_compute_s": [sum(one.seconds for one in host) for host in sweep.passes],
        "latency_s": HOPS * RTT_MS / 2e3,
        "wire_mb": sweep.wire_bytes / 1e6,
        "line_s": sweep.wire_bytes * 8e-6 / LINE_MBIT,
        **_named("ar_", whole),
        "ar_bytes_timed": len(slow.pieces_s),
        "ar_extrapolated": len(slow.pieces_s) < length,
        # Its hosts may compute at the same time, each on another part: no shares.
        "draft_seconds": draft.seconds,
        "draft_compute_s": draft.compute_s,
        "draft_extrapolated": drafted is None,
        "speedup": whole.seconds / once.seconds,
        "wan_speedup": whole.wan_s / once.wan_s,
        "draft_speedup": whole.seconds / draft.seconds,
        "waited": sweep.waited,
        "ar_waited": slow.waited,
        "retries": sum(one.retries for one in sweeps),  # their time is in the seconds
        "ar_retries": slow.retries,
        "draft_retries": drafted.retries if drafted is not None else 0,
    }


def _show(variant: Variant, mode: str, written: Written) -> None:
    print(
        f"{variant.name} {mode}: {len(written.pieces_s)} traversals, {written.seconds:.2f} s, "
        f"{written.compute_s:.2f} s of them in the blocks, {written.waited:.2f} of their CPU time",
        flush=True,
    )


# --- what a time consists of ----------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Seconds of an output: in the blocks' layers, and all the rest: latency, line, streams."""

    seconds: float
    compute_s: float

    @property
    def wan_s(self) -> float:
        return self.seconds - self.compute_s


def _named(prefix: str, one: Split) -> dict[str, float]:
    return {
        f"{prefix}seconds": one.seconds,
        f"{prefix}compute_s": one.compute_s,
        f"{prefix}wan_s": one.wan_s,
        f"{prefix}compute_share": one.compute_s / one.seconds,
        f"{prefix}wan_share": one.wan_s / one.seconds,
    }


def median_of(outputs: Sequence[Written]) -> Written:
    """The one whose time is the median (the faster of the middle two)."""
    return sorted(outputs, key=lambda one: one.seconds)[(len(outputs) - 1) // 2]


def split(written: Written) -> Split:
    return Split(written.seconds, written.compute_s)


def extrapolated(written: Written, length: int) -> Split:
    """Autoregression of `length` bytes: the first byte as it was, the mean of the others for all.

    The first traversal reads the prompt. Later ones differ only by what attention reads from the
    caches: at most a thousandth of the weights that they read. If all bytes were timed, the sum is
    what was measured.
    """
    first_s, last_s, more = written.pieces_s[0], written.pieces_s[-1], len(written.pieces_s) - 1
    prompt_s = sum(host[0].seconds for host in written.passes)
    scale = (length - 1) / more
    return Split(
        first_s + (last_s - first_s) * scale, prompt_s + (written.compute_s - prompt_s) * scale
    )


def drafted_from(slow: Written, sweep: Written, length: int) -> Split:
    """One sweep with one draft, from measured parts.

    The first host reads the prompt and then passes byte after byte, as in autoregression; the
    others pass all positions once and everything travels once, as in joint denoising.
    """
    prompt, *tokens = slow.passes[0]
    first_s = prompt.seconds + length * statistics.mean(one.seconds for one in tokens)
    others_s = sum(one.seconds for host in sweep.passes[1:] for one in host)
    compute_s = first_s + others_s
    return Split(sweep.seconds - sweep.compute_s + compute_s, compute_s)


# --- figures --------------------------------------------------------------------------------------


def figures(rows: Rows) -> Figures:
    found: Figures = {}
    for row in rows:
        label = row["name"].lower().replace(".", "_")
        found |= {
            f"seconds_{label}": row["seconds"],
            f"speedup_{label}": row["speedup"],
            f"compute_share_{label}": row["compute_share"],
            f"wan_share_{label}": row["wan_share"],
            f"wan_speedup_{label}": row["wan_speedup"],
            f"seconds_autoregressive_{label}": row["ar_seconds"],
            f"bytes_timed_autoregressive_{label}": row["ar_bytes_timed"],
            f"seconds_drafted_{label}": row["draft_seconds"],
        }
    return found
