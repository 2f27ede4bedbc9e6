"""The figures of gb_per_nat, its table and its plot, from rows that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gb_per_nat.rows import figures, pareto
from benchmarks.gb_per_nat.table import plot, table


def row(name: str, ce: float, mb: float, seed: int = 0, workers: int = 6) -> dict[str, Any]:
    return {
        "name": name,
        "codec": "topk:0.05:2:overall",
        "steps_per_round": 3,
        "rounds": 200,
        "workers": workers,
        "seed": seed,
        "ce": ce,
        "update_mb": mb,
        "relay_mb": mb,
        "everything_mb": 2 * mb,
        "gb_per_nat": mb / 1e3,
        "gb_per_nat_updates": mb / 1e3,
        "curve": [(0, 0, 5.5), (int(mb * 1e6), int(2e6 * mb), ce)],
    }


ROWS = [
    row("default", 1.75, 2),
    row("default, seed 1", 1.77, 2, seed=1),
    row("dense fp32", 1.74, 400),
    row("int8", 1.78, 100),
    row("one worker a block", 1.76, 0, workers=4),
    row("one worker a block, seed 1", 1.77, 0, seed=1, workers=4),
]


def test_figures_of_gb_per_nat() -> None:
    found = figures(ROWS)
    assert found["update_bytes_ratio"] == 200
    assert found["update_bytes_ratio_int8"] == 50
    assert found["ce_six_workers"] == pytest.approx(1.76)
    assert found["ce_one_per_block"] == pytest.approx(1.765)
    assert found["ce_spread"] == pytest.approx(0.02)
    assert pareto(ROWS) == ["default", "dense fp32"]
    assert figures([]) == {}


def test_page_of_gb_per_nat(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")  # of the extra `bench`; nothing else needs it
    assert len(table(ROWS)) == len(ROWS) + 4
    plot(ROWS, tmp_path / "plots" / "gb_per_nat.png")
    assert (tmp_path / "plots" / "gb_per_nat.png").stat().st_size > 1000
