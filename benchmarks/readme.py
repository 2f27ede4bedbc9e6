"""The figures in the README and in docs/figures.md: texts of ours, numbers of the result files.

A text in pages/ names each number where it stands, and no number is typed in by hand:

    {quality > ce_composed > .3f}                 a figure of results/quality.json
    {quality > independent > ce > .3f}            the value `ce` of its row `independent`
    {three_hosts > gb_per_nat > x1000 .1f}        times 1000, so GB as MB

What comes last is Python's format. Decides how a number is found and shown; what is said of it is
the text's business.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT

PAGES = Path(__file__).resolve().parent / "pages"
README = ROOT / "README.md"
FIGURES = ROOT / "docs" / "figures.md"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->\n"

_NAMED = re.compile(r"\{([^{}]+)\}")
_SHOWN = re.compile(r"(?:x(?P<times>[0-9]+) )?(?P<format>[^ ]+)")

Results = dict[str, dict[str, Any]]


class UnknownFigure(LookupError):
    """A page names a number that no result file has."""


def main() -> None:
    results = all_results()
    README.write_text(readme(README.read_text(), results))
    FIGURES.write_text(figures_page(results))
    print(f"wrote the figures of {README.relative_to(ROOT)} and {FIGURES.relative_to(ROOT)}")


def all_results() -> Results:
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    return {r["name"]: r for r in found if not r["command"].endswith("--quick")}


def readme(text: str, results: Results) -> str:
    """The README with its figures as the results have them."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    filled = rendered((PAGES / "readme.md").read_text(), results)
    return f"{before}{BEGIN}{filled}{END}{after}"


def figures_page(results: Results) -> str:
    return rendered((PAGES / "figures.md").read_text(), results)


def rendered(text: str, results: Results) -> str:
    """The text with every number that it names filled in."""
    return _NAMED.sub(lambda found: _number(found[1], results), text)


def _number(named: str, results: Results) -> str:
    file, *row, name, shown = (part.strip() for part in named.split(" > "))
    try:
        result = results[file]
        held = _row(result, *row) if row else result["figures"]
        value = held[name]
    except (KeyError, StopIteration) as error:
        raise UnknownFigure(f"{{{named}}}: {file}.json has no such number") from error
    form = _SHOWN.fullmatch(shown)
    if form is None:
        raise UnknownFigure(f"{{{named}}}: {shown!r} is no way to show a number")
    return format(value * int(form["times"] or 1), form["format"])


def _row(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in result["rows"] if row.get("name") == name)
