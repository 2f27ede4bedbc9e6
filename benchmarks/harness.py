"""The one form of every benchmark: options, environment, JSON, and rows that survive a cut.

    python -m benchmarks.NAME [--quick] [--out FILE] [--jobs N]

A benchmark gives `figures`, a flat map of names to numbers, and `rows`, its table. Knows nothing
of what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from node.machine.child_process import leave_with_parent

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

Figures = dict[str, float]
Rows = list[dict[str, Any]]


def main(name: str, run: Callable[[bool], tuple[Figures, Rows]], **facts: Any) -> None:
    """Run a benchmark whose rows take seconds: measure, then write."""
    options = parse(name)
    figures, rows = run(options.quick)
    write(options, name, figures, rows, facts)


def parse(name: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--quick", action="store_true", help="the same at a smaller scale (<1 min)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: results/)")
    parser.add_argument("--jobs", type=int, default=1, help="rows measured side by side")
    parser.add_argument("--only", default="", help="the row of this name, or all with it")
    options = parser.parse_args(argv)
    if options.out is None:
        options.out = RESULTS / f"{name}{'_quick' if options.quick else ''}.json"
    return options


def measure_rows(
    options: argparse.Namespace,
    name: str,
    variants: Iterable[Any],
    measure: Callable[[Any], dict[str, Any]],
    figures: Callable[[Rows], Figures],
    facts: dict[str, Any],
) -> None:
    """Measure rows that take minutes each. A row that is in the file already is not measured again.

    A variant is anything with a `name` and a `key` (a text that changes when the measurement
    would). The file is rewritten after every row, so a cut costs only the rows under way.
    """
    table = list(variants)
    wanted = [v for v in table if v.name == options.only]
    wanted = wanted or [v for v in table if options.only in v.name]
    done = {row["key"] for row in rows_of(options.out)}
    todo = [v for v in wanted if v.key not in done]
    print(f"{name}: {len(wanted) - len(todo)} rows are there, {len(todo)} to measure", flush=True)
    order = {v.key: place for place, v in enumerate(table)}
    # The code is the one that the processes have loaded, whatever is committed meanwhile.
    loaded = origin()
    context = get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, initializer=leave_with_parent) as pool:
        futures = {pool.submit(measure, v): v for v in todo}
        for future in as_completed(futures):
            variant = futures[future]
            row = {"name": variant.name, "key": variant.key, **loaded, **future.result()}
            # What had this name before was another measurement: the table has changed since.
            others = [r for r in rows_of(options.out) if r["name"] != variant.name]
            rows = sorted([*others, row], key=lambda r: order.get(r["key"], len(order)))
            write(options, name, figures(rows), rows, facts)
    rows = rows_of(options.out)
    write(options, name, figures(rows), rows, facts)  # also if only the figures are others now


def origin() -> dict[str, str]:
    """Rows of one file may be of several sessions and machines: each says of which."""
    return {"commit": commit(), "cpu": _cpu()}


def figures_apart(
    rows: Rows, prefix: str, figure_prefix: str, figures: Callable[[Rows], Figures]
) -> Figures:
    """The figures of a table, and of those rows whose names begin with `prefix`, as if they were a
    table of their own, under names that say so."""
    others = [row for row in rows if row["name"].startswith(prefix)]
    own = [row for row in rows if not row["name"].startswith(prefix)]
    apart = figures([{**row, "name": row["name"].removeprefix(prefix)} for row in others])
    return figures(own) | {figure_prefix + name: value for name, value in apart.items()}


def write(
    options: argparse.Namespace, name: str, figures: Figures, rows: Rows, facts: dict[str, Any]
) -> None:
    """Write the result, whole or not at all, and show its figures."""
    result = {
        "name": name,
        "command": f"python -m benchmarks.{name}" + (" --quick" if options.quick else ""),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "seeds": [],  # unless the benchmark says which it drew from
        **facts,
        "figures": figures,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    half = options.out.with_suffix(f".{os.getpid()}.tmp")
    half.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    half.replace(options.out)
    for key, value in figures.items():
        print(f"{name}.{key} = {value:.6g}", flush=True)


def environment() -> dict[str, Any]:
    """What a reader needs to judge a timing. No host name, no paths."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            package: found
            for package in ("torch", "numpy", "hivemind", "libp2p", "zstandard", "msgpack")
            if (found := _version(package))
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def rows_of(path: Path) -> Rows:
    if not path.exists():
        return []
    rows: Rows = json.loads(path.read_text())["rows"]
    return rows


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


def commit(root: Path = ROOT) -> str:
    """The commit of the code. What benchmarks write does not make it another one."""
    written = [":!benchmarks/results", ":!docs", ":!README.md"]
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *written)
    return f"{head}-dirty" if changed else head


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit("this is the frame of the benchmarks; run one of them: python -m benchmarks.quality")
