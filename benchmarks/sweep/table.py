"""The tables and the plot of the serving benchmark in docs/benchmarks.md, from its rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.page import cell, plot_in

Row = dict[str, Any]

TABLES = {
    "time": (
        "One output, sampled. `limit`: the latencies of its hops and its arithmetic measured "
        "alone, together; `wire`: all that the kernels of all hosts sent; `after_idle_s`: the "
        "first output after some seconds of rest, 0 where it was not measured.",
        "mode rtt_ms seconds after_idle_s bytes_per_s traversals wire_kb limit_s limit_ratio "
        "failures",
    ),
    "text": (
        "What was written, sampled at temperature 1. `from composed`: CE under the composed model "
        "minus that of the composed model's own samples.",
        "name ce_reference ce_composed from_composed_nats repetition bytes_per_traversal judged",
    ),
    "exact": (
        "Greedy `exact` on the wire, beside local generation from the same model.",
        "name outputs mismatches near_ties bytes_per_traversal",
    ),
    "clients": (
        "One-sweep outputs asked for at the same time (by one node, on the same machine).",
        "clients bytes_per_s p50_s p99_s outputs failures retries without_a_block",
    ),
}


def tables(rows: list[Row]) -> list[str]:
    lines: list[str] = []
    for kind, (words, names) in TABLES.items():
        columns = names.split()
        lines += ["", words, "", "| " + " | ".join(columns) + " |"]
        lines.append("| " + " | ".join("---" for _ in columns) + " |")
        for row in rows:
            if row["kind"] == kind:
                cells = (cell(row.get(column, "")) for column in columns)
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot(rows: list[Row], path: Path) -> None:
    """Seconds per output over the round-trip time, one line a mode."""
    timed = [row for row in rows if row["kind"] == "time"]
    with plot_in(path) as axes:
        for mode in dict.fromkeys(row["mode"] for row in timed):
            own = [row for row in timed if row["mode"] == mode]
            axes.plot([r["rtt_ms"] for r in own], [r["seconds"] for r in own], "o-", label=mode)
        axes.set_xlabel("round-trip time between any two hosts, ms")
        axes.set_ylabel("seconds per output")
        axes.set_yscale("log")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
