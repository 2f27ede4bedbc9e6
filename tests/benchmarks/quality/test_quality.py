"""Rows of the quality benchmark survive a cut, and are the same measurement as without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import harness
from benchmarks.quality import row as quality_row
from benchmarks.quality import table as quality_table
from benchmarks.quality.variants import QUICK, run_of, variants
from benchmarks.unfinished import Unfinished
from node.data.corpus import Corpus
from protocol.errors import DataError

TINY = {"width": 32, "heads": 2, "context": 32, "batch": 4, "steps": 24, "steps_per_round": 5}
ORIGIN = {"commit": "abc", "cpu": "x"}
TIMES = ("cpu_seconds", "training_cpu_s")


class Cut(Exception):
    """The end of a session."""


@pytest.fixture(autouse=True)
def _own_text_and_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    text = np.frombuffer(Path(__file__).read_bytes() * 8, dtype=np.uint8)
    corpus = Corpus("this file", "here", "", text[:16000], text[16000:32000], text[:100])
    monkeypatch.setattr(quality_row, "benchmark_corpus", lambda: corpus)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def variant(**special: Any) -> quality_row.Variant:
    return quality_row.Variant("row", run_of(1.0, **TINY), evaluation_bytes=4096, **special)


def cut_after(
    learner: type[quality_row.Blocks] | type[quality_row.EndToEnd],
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = learner.step

    def until_then(self: Any, number: int, text: quality_row.Text) -> None:
        if number == steps:
            raise Cut
        step(self, number, text)

    monkeypatch.setattr(learner, "step", until_then)


@pytest.mark.parametrize("end_to_end", [False, True])
def test_a_row_that_was_cut_off_goes_on_to_the_same_result(
    end_to_end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = variant(end_to_end=end_to_end)
    whole = quality_row.measure(row)
    with monkeypatch.context() as patch:
        cut_after(quality_row.EndToEnd if end_to_end else quality_row.Blocks, 17, patch)
        with pytest.raises(Cut):
            quality_row.measure(row, tmp_path, ORIGIN)
    [kept] = tmp_path.iterdir()
    seen: list[int] = []
    with monkeypatch.context() as patch:
        batch = quality_row.Text.batch
        patch.setattr(
            quality_row.Text, "batch", lambda s, n, *a: (seen.append(n), batch(s, n, *a))[1]
        )
        again = quality_row.measure(row, tmp_path, ORIGIN)
    assert min(seen) == 16  # the last twelfth before the cut
    assert {k: v for k, v in again.items() if k not in TIMES} == {
        k: v for k, v in whole.items() if k not in TIMES
    }
    assert again["cpu_seconds"] >= again["training_cpu_s"] > 0
    assert not kept.exists()


def test_what_is_of_another_row_other_code_or_broken_is_not_gone_on_with(tmp_path: Path) -> None:
    row, origin = variant(), {"commit": "abc", "cpu": "x"}
    kept = Unfinished(tmp_path, row.key, origin)
    assert kept.load() is None
    kept.save(*quality_row.Blocks(row).state())
    assert kept.load() is not None
    assert Unfinished(tmp_path, row.key, {**origin, "commit": "abd"}).load() is None
    dirty = Unfinished(tmp_path, "dirty", {**origin, "commit": "abc-dirty"})
    dirty.save({}, {"step": 1})
    assert dirty.load() is None
    kept.path.rename(Unfinished(tmp_path, "another", origin).path)
    assert Unfinished(tmp_path, "another", origin).load() is None
    kept.path.write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    assert kept.load() is None
    kept.remove()
    assert not kept.path.exists()


def test_what_is_fitted_on_is_not_reported() -> None:
    with pytest.raises(DataError, match="16000 bytes"):
        quality_row.Text(replace(variant(), evaluation_bytes=6000))


def test_a_quick_table_has_one_of_each_way_to_train() -> None:
    rows = variants(quick=True)
    assert [row.name for row in rows] and {row.name for row in rows} == set(QUICK)
    assert {row.run.model.coupling for row in rows} == {"independent", "relay", "look_ahead"}
    assert sum(row.end_to_end for row in rows) == 1
    assert sum(row.run.training.steps * row.run.model.blocks for row in rows) < 500


def test_the_origin_of_a_row_names_code_and_cpu() -> None:
    assert set(harness.origin()) == {"commit", "cpu"} and all(harness.origin().values())


def test_page_of_quality(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")  # of the extra `bench`; nothing else needs it
    blocks = quality_row.measure(variant())
    end_to_end = quality_row.measure(variant(end_to_end=True))
    rows = [
        {"name": "default, seed 0", **blocks},
        {"name": "end-to-end, seed 0", **end_to_end},
        {"name": "AdamW: default, seed 0", **blocks},
    ]
    lines = quality_table.table(rows)[-3:]
    assert all(line.count("|") == 11 for line in lines)
    assert f"{end_to_end['ce']:.4f}" in lines[1]
    quality_table.plot(rows, tmp_path / "plots" / "quality.png")
    assert (tmp_path / "plots" / "quality.png").stat().st_size > 1000
