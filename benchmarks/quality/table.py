"""The table and the plot of the quality benchmark in docs/benchmarks.md, from its rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.page import cell, plot_in
from benchmarks.quality.variants import ADAMW

Row = dict[str, Any]

HEADLINE = {
    "default, seed ": ("C0", "-", "blocks, the default"),
    "end-to-end, seed ": ("black", "--", "end to end"),
}
SHORT_BYTES = 2.5e6  # rows that see fewer are drawn together


def table(rows: list[Row]) -> list[str]:
    lines = [
        "Honest CE in nats per byte. `CE`: one weight a block and a temperature, fitted on other "
        "bytes, where there are blocks; `blocks`: each block's own head.",
        "",
        "| row | MB a block | shape | sigma | copies' age | CE | newest versions | plain mean | "
        "blocks | CPU s a worker |",
        "| " + "--- | " * 10,
    ]
    for row in rows:
        way = "staggered" if "ce_staggered_blocks" in row else "newest"
        blocks = row.get(f"ce_{way}_blocks") or row.get("ce_heads", [])
        cells = [
            row["name"],
            f"{row['bytes_seen_per_block'] / 1e6:.1f}",
            row["shape"],
            "–".join(f"{s:g}" for s in row["sigma"]) if row["objective"] != "plain" else "",
            row["copies_age_steps"] if row["coupling"] in ("relay", "look_ahead") else "",
            f"{row['ce']:.4f}",
            cell(row.get("ce_newest_fitted", "")),
            cell(row.get(f"ce_{way}_mean", "")),
            " ".join(f"{ce:.3f}" for ce in blocks),
            row["training_cpu_s"],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def plot(rows: list[Row], path: Path) -> None:
    """CE over bytes seen: the headline's pairs, and beside them the rows of 2 MB. Rows of AdamW
    stand in the table only."""
    with plot_in(path, 1, 2, size=(12, 5.5)) as (pairs, others):
        named: set[str] = set()
        for row in rows:
            for begins, (color, style, label) in HEADLINE.items():
                if row["name"].startswith(begins):
                    seen = "" if label in named else label
                    pairs.plot(*_curve(row), style, color=color, lw=1, label=seen)
                    named.add(label)
        short = [r for r in rows if r["bytes_seen_per_block"] < SHORT_BYTES]
        for number, row in enumerate(r for r in short if not r["name"].startswith(ADAMW)):
            style = ("-", "--", ":")[number // 10 % 3]
            others.plot(*_curve(row), style, color=f"C{number % 10}", lw=1, label=row["name"])
        for axes, words, lowest in ((pairs, "6 MB, every seed", 1.18), (others, "2 MB", 1.3)):
            axes.set_title(words)
            axes.set_xlabel("MB seen by a block")
            axes.set_ylim(lowest - 0.02, lowest + 0.7)
            axes.legend(fontsize=7)
            axes.grid(alpha=0.3)
        pairs.set_ylabel("honest CE, nats per byte (the first 32 kB of valid)")


def _curve(row: Row) -> tuple[list[float], list[float]]:
    return [point[0] / 1e6 for point in row["curve"]], [point[1] for point in row["curve"]]
