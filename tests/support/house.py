"""Counts what makes the code hard to follow: `python -m tests.support.house`."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

PACKAGES = ("protocol", "swarm", "node")
LONG_FILE, LARGE_CLASS = 300, 15  # lines, methods
_STEP = re.compile(r"^\d+\. ", re.MULTILINE)
_FILE = re.compile(r"`((?:protocol|swarm|node)/[\w/]+\.py)`")


def files() -> list[Path]:
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def definitions() -> Iterator[tuple[str, str, Path]]:
    """(kind, name, file) of every public class and function at the top of a module."""
    for path in files():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                yield "class", node.name, path
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield "function", node.name, path


def doubles(kind: str) -> dict[str, list[str]]:
    """Public names of this kind that several files define."""
    found: dict[str, list[str]] = defaultdict(list)
    for one, name, path in definitions():
        if one == kind and not name.startswith("_"):
            found[name].append(str(path.relative_to(ROOT)))
    return {name: places for name, places in found.items() if len(places) > 1}


def large_classes() -> list[tuple[int, str]]:
    found = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
                methods = [part for part in node.body if isinstance(part, kinds)]
                if len(methods) > LARGE_CLASS:
                    found.append((len(methods), node.name))
    return sorted(found, reverse=True)


def ways() -> dict[str, tuple[int, list[str]]]:
    """The ways in CONTRIBUTING.md: how many steps each has, and which files."""
    sections = (ROOT / "CONTRIBUTING.md").read_text().split("\n## ")
    found = {}
    for section in sections:
        title, _, text = section.partition("\n")
        if title.startswith("The way of"):
            found[title] = len(_STEP.findall(text)), list(dict.fromkeys(_FILE.findall(text)))
    return found


def main() -> None:
    for name in PACKAGES:
        print(f"{name:10} {sum(map(lines, (ROOT / name).rglob('*.py'))):6} lines")
    print(f"{'in all':10} {sum(map(lines, files())):6} lines in {len(files())} files")
    long = sorted(((lines(p), str(p.relative_to(ROOT))) for p in files()), reverse=True)
    long = [(count, name) for count, name in long if count > LONG_FILE]
    print(f"{len(long)} files of more than {LONG_FILE} lines, the longest {long[:3]}")
    large = large_classes()
    print(f"{len(large)} classes of more than {LARGE_CLASS} methods: {large}")
    for kind in ("class", "function"):
        print(f"{kind} names with two meanings: {', '.join(sorted(doubles(kind))) or 'none'}")
    for title, (steps, places) in ways().items():
        print(f"{title}: {steps} steps in {len(places)} files")


if __name__ == "__main__":
    main()
