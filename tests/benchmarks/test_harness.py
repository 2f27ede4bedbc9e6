"""Rows that take minutes: measured once, kept over a cut, replaced when the table changes."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness


@dataclass(frozen=True)
class Variant:
    name: str
    key: str
    value: float = 0.0


def measure(variant: Variant) -> dict[str, Any]:
    return {"ce": variant.value}


def figures(rows: harness.Rows) -> harness.Figures:
    return {row["name"]: row["ce"] for row in rows}


def run(out: Path, *table: Variant, only: str = "") -> dict[str, Any]:
    options = harness.parse("made_up", ["--out", str(out), "--only", only])
    harness.measure_rows(options, "made_up", table, measure, figures, {"seeds": [0]})
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_a_row_is_measured_once_and_again_when_it_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    first, second = Variant("first", "1", 1.0), Variant("second", "2", 2.0)
    result = run(out, first, second, only="second")
    assert result["figures"] == {"second": 2.0}
    result = run(out, first, second)
    assert "1 rows are there, 1 to measure" in capsys.readouterr().out
    assert [row["name"] for row in result["rows"]] == ["first", "second"]
    assert {"commit", "environment", "date", "command"} <= result.keys()
    assert result["seeds"] == [0]
    # Another measurement under the same name replaces it; the other row stays.
    result = run(out, Variant("first", "1, with Muon", 3.0), second)
    assert result["figures"] == {"first": 3.0, "second": 2.0}
    assert [row["key"] for row in result["rows"]] == ["1, with Muon", "2"]


def test_a_benchmark_that_draws_nothing_says_so(tmp_path: Path) -> None:
    options = harness.parse("made_up", ["--out", str(tmp_path / "result.json")])
    harness.write(options, "made_up", {}, [], {})
    assert json.loads(options.out.read_text())["seeds"] == []


def test_the_commit_is_that_of_the_code(tmp_path: Path) -> None:
    """A long table writes results while it runs: its later rows are of the same code."""

    def git(*words: str) -> None:
        name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    assert harness.commit(tmp_path) == "unknown"
    code, result = tmp_path / "code.py", tmp_path / "benchmarks" / "results" / "quality.json"
    result.parent.mkdir(parents=True)
    code.write_text("1\n")
    result.write_text("{}\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    clean = harness.commit(tmp_path)
    assert len(clean) == 12 and set(clean) <= set("0123456789abcdef")
    result.write_text('{"rows": []}\n')
    assert harness.commit(tmp_path) == clean
    code.write_text("2\n")
    assert harness.commit(tmp_path) == f"{clean}-dirty"
