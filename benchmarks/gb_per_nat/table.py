"""The table and the plot of gb_per_nat in docs/benchmarks.md, from its rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gb_per_nat.rows import pareto
from benchmarks.page import plot_in

Row = dict[str, Any]


def table(rows: list[Row]) -> list[str]:
    best = pareto(rows)
    lines = [
        "MB of all hosts together. `updates`: among the replicas of a block; `all`: with what "
        "workers fetch of other blocks' logs (`relay`), votes and records (estimated). Pareto: no "
        "other row of these six workers has fewer bytes and a lower CE.",
        "",
        "| row | codec | steps a round | rounds | workers | seed | CE | updates | relay | all | "
        "GB per nat | Pareto |",
        "| " + "--- | " * 12,
    ]
    for row in rows:
        cells = [
            *(row[k] for k in ("name", "codec", "steps_per_round", "rounds", "workers", "seed")),
            f"{row['ce']:.4f}",
            *(f"{row[k]:.1f}" for k in ("update_mb", "relay_mb", "everything_mb")),
            f"{row['gb_per_nat']:.4f}",
            "yes" if row["name"] in best else "",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def plot(rows: list[Row], path: Path) -> None:
    """CE over bytes moved, updates alone and everything, for seed 0."""
    with plot_in(path, 1, 2, size=(11, 5), sharey=True) as both:
        for place, (axes, what) in enumerate(zip(both, ("updates", "everything"), strict=True)):
            for number, row in enumerate(r for r in rows if r["seed"] == 0):
                points = [(p[place] / 1e9, p[2]) for p in row["curve"] if p[place] > 0]
                # A row may have no updates: each keeps its colour, and after ten another line.
                style = {"color": f"C{number % 10}", "ls": ("-", "--", ":")[number // 10 % 3]}
                if points:
                    axes.plot(*zip(*points, strict=True), ".", label=row["name"], lw=1, **style)
            axes.set_xscale("log")
            axes.set_xlabel(f"GB moved by all hosts: {what}")
            axes.grid(alpha=0.3)
        both[0].set_ylabel("honest CE, nats per byte (16 kB of valid)")
        both[1].legend(fontsize=7)
