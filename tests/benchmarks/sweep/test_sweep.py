"""The serving benchmark's own arithmetic: what counts as repetition, a figure, a table."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sweep import table as sweep_table
from benchmarks.sweep.hosts import HOSTS, TOPOLOGY
from benchmarks.sweep.model import REPEATED_BYTES, repetition
from benchmarks.sweep.modes import MODES, troubles
from benchmarks.sweep.rows import figures
from benchmarks.wan import topology


def test_repetition_counts_runs_that_were_there_before() -> None:
    once = bytes(range(64))
    assert repetition([once], [bytes(range(64, 128))]) == 0
    assert repetition([once], [once]) == pytest.approx(1 - (REPEATED_BYTES - 1) / 64)
    assert repetition([b"a" * 16], [b"a" * 16]) == 1


def rows() -> list[dict[str, Any]]:
    none = {"outputs": 2, "failures": 0, "retries": 0, "without_a_block": 0}
    made: list[dict[str, Any]] = []
    for place, mode in enumerate(MODES, start=1):
        facts = {"seconds": place * 10.0, "bytes_per_s": 1.0, "traversals": 1.0, "wire_kb": 5.0}
        limits = {"limit_s": 8.0, "limit_ratio": place * 10 / 8}
        made.append({"kind": "time", "name": f"{mode.name}, RTT 100 ms", "mode": mode.name,
                     "rtt_ms": 100, **facts, **limits, **none})  # fmt: skip
    for name in ("the true text", *(mode.name for mode in MODES)):
        made.append({"kind": "text", "name": name, "ce_reference": 1.5, "ce_composed": 1.6,
                     "from_composed_nats": 0.1, "repetition": 0.0, "judged": 2,
                     "bytes_per_traversal": 6.0})  # fmt: skip
    made.append({"kind": "exact", "name": "greedy", "mismatches": 0, "near_ties": 1, **none})
    for clients in (1, 64):
        made.append({"kind": "clients", "name": f"{clients} clients", "clients": clients,
                     "bytes_per_s": 9.0, "p50_s": 1.0, "p99_s": 2.0, **none})  # fmt: skip
    return made


def test_figures_come_from_the_rows() -> None:
    found = figures(rows())
    assert found["speedup_rtt100"] == len(MODES)
    assert found["limit_ratio_rtt100"] == 10 / 8
    assert found["exact_bytes_per_traversal"] == 6
    assert found["failures_64_clients"] == found["exact_mismatches"] == 0


def test_tables_have_a_line_for_every_row() -> None:
    lines = sweep_table.tables(rows())
    assert sum(line.startswith("| ") for line in lines) == len(rows()) + 2 * len(sweep_table.TABLES)


def test_an_output_that_is_short_or_lacks_a_block_is_seen() -> None:
    mode = MODES[0]
    good = {"hex": "00" * 4, "error": "", "missing": [], "retries": 0}
    outputs = [good, {**good, "hex": ""}, {**good, "missing": [2]}, {**good, "error": "no"}]
    counted = troubles(outputs, mode, 4)
    assert (counted["outputs"], counted["failures"], counted["without_a_block"]) == (4, 2, 1)


def test_the_bed_of_the_benchmark_is_a_topology() -> None:
    found = topology.parse(TOPOLOGY.encode())
    assert [host.name for host in found.hosts] == [*HOSTS, "client"]
    assert {host.link.up_mbit for host in found.hosts} == {100}
