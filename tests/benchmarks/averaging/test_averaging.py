"""What the benchmark of averaging makes of its rounds, and the vectors that are averaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.averaging import rounds, rows
from protocol.codec import DEFAULT_CODEC


def timed(system: str, codec: str, size_mb: int, link: int | None, seconds: float) -> Any:
    found = {"seconds": seconds, "cpu_s": seconds, "bytes": 1e6 * seconds, "error": 0.0}
    before = {"matchmaking": 1.0} if system == "hivemind" else {}
    return rows.row(system, codec, 4, size_mb, link, [{**found, **before, "included": 4}])


def test_figures_are_those_of_the_worst_size_and_keep_the_links_apart() -> None:
    ours = DEFAULT_CODEC
    measured = [
        timed("ours", ours, 10, None, 1.0),
        timed("hivemind", "fp16", 10, None, 3.0),
        timed("ours", ours, 100, None, 2.0),
        timed("hivemind", "fp16", 100, None, 5.0),
        timed("ours", ours, 100, 100, 2.0),
        timed("hivemind", "fp16", 100, 100, 16.0),
        {"killed": "ours", "codec": "int8", "error": 0.004},
        {"killed": "hivemind", "codec": "fp16", "error": 0.4},
        {"killed": "hivemind", "codec": "uniform8", "error": 0.5},
    ]
    figures = rows.figures_of(measured)
    assert figures["speedup_4"] == figures["bytes_ratio_4"] == 2.5
    assert figures["speedup_100mbit_4"] == 8.0
    assert figures["speedup_round_4"] == 3.0  # (5 + 1) / 2, and not (3 + 1) / 1
    assert "speedup_int8_4" not in figures
    assert (figures["killed_error_ours"], figures["killed_error_hivemind"]) == (0.004, 0.4)


def test_vectors_are_the_same_again_and_have_the_mean_that_is_written(tmp_path: Path) -> None:
    paths = rounds.make_vectors(tmp_path, 3, 4000)
    vectors = [np.load(path) for path in paths]
    again = [np.load(path) for path in rounds.make_vectors(tmp_path, 3, 4000)]
    assert all(np.array_equal(a, b) for a, b in zip(vectors, again, strict=True))
    assert not np.array_equal(vectors[0], vectors[1])
    mean = np.load(rounds.mean_of(paths[:2], "mean"))
    assert mean == pytest.approx((vectors[0] + vectors[1]) / 2, abs=1e-8)
