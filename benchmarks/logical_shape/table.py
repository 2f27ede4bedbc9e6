"""The table and the plot of the logical-shape benchmark in docs/benchmarks.md, from its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.page import plot_in

Row = dict[str, Any]

HEADS = (
    "shape",
    "parameters",
    "blocks x layers x width",
    "physical layers a block",
    "one sweep, s",
    "of it blocks",
    "of it WAN",
    "MB on the wire",
    "autoregressive, s",
    "of it blocks",
    "of it WAN",
    "speedup",
    "of the WAN part",
    "one drafted sweep, s",
)


def table(rows: list[Row]) -> list[str]:
    lines = [
        "Seconds for one output. One sweep: joint denoising, all bytes in one pass through every "
        "block and one traversal, always written whole. `blocks`: time in the layers of the three "
        "hosts; `WAN`: all the rest (latency, line, streams, packing). Weights are random and "
        "shared between layers, so the text means nothing. Drafted: one draft by the first host, "
        "scored by the others.",
        "",
        "| " + " | ".join(HEADS) + " |",
        "| " + " --- |" * len(HEADS),
    ]
    return lines + ["| " + " | ".join(_cells(row)) + " |" for row in rows]


def _cells(row: Row) -> list[str]:
    slow, draft = _seconds(row, "ar_"), _seconds(row, "draft_")
    if row["ar_extrapolated"]:
        slow += f" (extrapolated from {row['ar_bytes_timed']} bytes)"
    if row["draft_extrapolated"]:
        draft += " (extrapolated)"
    return [
        row["name"],
        f"{row['parameters'] / 1e9:.4g} billion",
        row["shape"],
        str(row["physical_layers"]),
        _seconds(row, ""),
        f"{row['compute_share']:.0%}",
        f"{row['wan_share']:.0%}",
        f"{row['wire_mb']:.3g}",
        slow,
        f"{row['ar_compute_share']:.0%}",
        f"{row['ar_wan_share']:.0%}",
        f"{row['speedup']:.3g}",
        f"{row['wan_speedup']:.3g}",
        draft,
    ]


def _seconds(row: Row, prefix: str) -> str:
    """An output that a failure delayed says so."""
    again = row[f"{prefix}retries"]
    return f"{row[f'{prefix}seconds']:.4g}" + (f" with {again} sent again" if again else "")


def plot(rows: list[Row], path: Path) -> None:
    """Seconds of an output over the parameters; what was extrapolated is hollow."""
    with plot_in(path) as axes:
        for prefix, label in (
            ("ar_", "autoregressive"),
            ("draft_", "drafted sweep"),
            ("", "denoise"),
        ):
            points = [(row["parameters"], row[f"{prefix}seconds"]) for row in rows]
            [line] = axes.plot(*zip(*points, strict=True), "o-", label=label)
            hollow = [
                p for p, row in zip(points, rows, strict=True) if row.get(f"{prefix}extrapolated")
            ]
            for point in hollow:
                axes.plot(*point, "o", mec=line.get_color(), mfc="white")
        waiting = [(row["parameters"], row["wan_s"]) for row in rows]
        axes.plot(*zip(*waiting, strict=True), ":", color="gray", label="denoise, WAN part")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("logical parameters (hollow: extrapolated)")
        axes.set_ylabel("seconds per output")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
