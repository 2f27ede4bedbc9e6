"""The README's figures are those of the result files, and a page cannot name one that is not."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import readme

MADE_UP: dict[str, dict[str, Any]] = {
    "bytes": {
        "figures": {"gb": 0.0364, "faults": 9},
        "rows": [{"share": 1.0}, {"name": "a row, 0.5", "ce": 1.2345}],
    }
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{bytes > gb > .2f} GB", "0.04 GB"),
        ("{bytes > gb > x1000 .1f} MB", "36.4 MB"),
        ("{bytes > faults > d} faults", "9 faults"),
        ("| {bytes > a row, 0.5 > ce > .3f} |", "| 1.234 |"),
        ("no number", "no number"),
    ],
)
def test_a_number_is_filled_in_where_it_is_named(text: str, shown: str) -> None:
    assert readme.rendered(text, MADE_UP) == shown


@pytest.mark.parametrize(
    "text",
    [
        "{other > gb > .2f}",
        "{bytes > tb > .2f}",
        "{bytes > no such row > ce > .2f}",
        "{bytes > a row, 0.5 > gb > .2f}",
        "{bytes > gb > times 3}",
    ],
)
def test_a_number_that_is_not_there_is_named(text: str) -> None:
    with pytest.raises(readme.UnknownFigure) as error:
        readme.rendered(f"before {text} after", MADE_UP)
    assert text in str(error.value)


def test_the_pages_have_the_figures_of_the_result_files() -> None:
    results, remedy = readme.all_results(), "run: python -m benchmarks.docs"
    text = readme.README.read_text()
    assert readme.readme(text, results) == text, remedy
    assert readme.figures_page(results) == readme.FIGURES.read_text(), remedy
