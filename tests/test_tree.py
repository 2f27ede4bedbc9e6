"""The tree is the architecture: what the README and the folders say of it is what is there.

And in `swarm` and `node` a folder imports only from those that its package names above it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ("protocol", "swarm", "node", "benchmarks")
IN_FOLDERS = ("swarm", "node")
HIDDEN = ("__init__", "__main__")
FOLDERS = [
    folder
    for package in IN_FOLDERS
    for folder in (ROOT / package, *sorted((ROOT / package).rglob("*/")))
    if (folder / "__init__.py").exists()
] + [init.parent for init in sorted((ROOT / "benchmarks").glob("*/__init__.py"))]


def listed(package: str) -> set[str]:
    """Names of files, patterns of them, and folders, under a package's line of the README."""
    lines = (ROOT / "README.md").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"    {package}/ "))
    found: set[str] = set()
    for line in lines[first + 1 :]:
        if not line.startswith("      "):
            break
        names = line[6:].split("  ")[0]  # before what it is; a line of words alone has none
        found |= set(re.findall(r"[\w*]+(?:\.py|/)", names))
    return found


def here(folder: Path) -> set[str]:
    """Modules, and folders with a slash."""
    modules = {path.stem for path in folder.glob("*.py")} - set(HIDDEN)
    return modules | {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}


def said_to_be_here(folder: Path) -> list[str]:
    """What the docstring of a folder lists, in its order."""
    source = ast.parse((folder / "__init__.py").read_text())
    text = ast.get_docstring(source) or ""
    return re.findall(r"^(?: {4})?(\w+/?) {2,}", text, re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_at_the_top_of_a_package_is_in_the_readme(package: str) -> None:
    there = {n if n.endswith("/") else f"{n}.py" for n in here(ROOT / package)}
    named = listed(package)
    missing = sorted(m for m in there if not any(fnmatch(m, name) for name in named))
    assert not missing, f"{package}/: say in the README's tree what these are"
    files = {name for name in named if not (ROOT / package / name).is_dir()}
    gone = sorted(n for n in files if not any(fnmatch(m, n) for m in there))
    assert not gone, f"{package}/: the README's tree names what is not there"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_folder_says_what_is_in_it(folder: Path) -> None:
    said = said_to_be_here(folder)
    assert len(said) == len(set(said))
    # `node` says in words what `cli` is: it is the command.
    assert set(said) == here(folder) - {"cli"}


def is_module(name: str, folder: Path) -> bool:
    """Whether a docstring in this folder may call one so: beside it, or from the top."""
    parts = name.removesuffix(".py").split(".")
    places = (folder.joinpath(*parts), ROOT.joinpath(*parts))
    return any(place.is_dir() or place.with_suffix(".py").exists() for place in places)


def test_a_docstring_says_whose_the_rest_is() -> None:
    """The modules that it names as owners are there: one that moves takes its name along."""
    named = [
        (path, name)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in re.findall(r"`([\w.]+)`'", ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
    assert len(named) > 20
    gone = [(path, name) for path, name in named if not is_module(name, path.parent)]
    assert not gone


def upward(package: str, order: list[str]) -> Iterator[str]:
    """Imports of a folder that is named below the importing one."""
    for place, folder in enumerate(order):
        below = {f"{package}.{name}" for name in order[place + 1 :]}
        for path in sorted((ROOT / package / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Import | ast.ImportFrom):
                    continue
                names = {f"{getattr(node, 'module', '') or ''}.{a.name}" for a in node.names}
                for name in (name.lstrip(".") for name in names):
                    if ".".join(name.split(".")[:2]) in below:
                        yield f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", IN_FOLDERS)
def test_folders_import_from_those_above_them(package: str) -> None:
    order = [name.rstrip("/") for name in said_to_be_here(ROOT / package) if name.endswith("/")]
    assert not list(upward(package, order))
    # Turned round, nearly everything is wrong: the check sees what it is meant to see.
    assert len(list(upward(package, order[::-1]))) > len(order)
