"""The tables and the plot of the public-network experiments in docs/benchmarks.md, from rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.page import cell, plot_in

Row = dict[str, Any]

COLUMNS = (
    "name codec workers shape rounds ce_start ce_end gb_moved gb_per_nat gb_ledger "
    "ledger_error_percent included_percent tcp_resent_percent"
)
TEN_COLUMNS = (
    "name nat_included lossy_included slow_included slow_rounds others_round_s others_deadline_s"
)


def tables(rows: list[Row]) -> list[str]:
    lines = [
        "`gb_moved`: bytes of all hosts' kernels, each once, with headers, DHT and assembly. CE is "
        "the assembled model's on the test split, `ce_start` that of the first weights. "
        "`included_percent`: updates that the consensus took, from the round on by which one of "
        "every worker had counted.",
        *_table(rows, COLUMNS.split()),
    ]
    ten = [row for row in rows if "nat_included" in row]
    if ten:
        lines += [
            "",
            "Of ten hosts: shares of the updates sent that were included; how long a decided round "
            "of the others in the slow host's block took, and how long they waited for updates.",
            *_table(ten, TEN_COLUMNS.split()),
        ]
    return lines


def _table(rows: list[Row], columns: list[str]) -> list[str]:
    lines = ["", "| " + " | ".join(columns) + " |", "| " + " --- |" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |")
    return lines


def plot(rows: list[Row], path: Path) -> None:
    """The last block's CE over the bytes that frames took."""
    with plot_in(path) as axes:
        for row in rows:
            points = [(gb, ce) for _, gb, ce in row["curve"] if gb > 0]
            if points:
                axes.plot(*zip(*points, strict=True), ".-", label=row["name"], lw=1)
        axes.set_xscale("log")
        axes.set_xlabel("GB in frames, all hosts")
        axes.set_ylabel("CE of the last block's consensus, nats per byte")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
