"""The tree at the end of the README is the tree: every module is in it, and nothing else."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocol", "swarm", "node", "benchmarks")
HIDDEN = ("__init__.py", "__main__.py")


def listed(package: str) -> set[str]:
    """Names of files, and patterns of them, under a package's line."""
    lines = (ROOT / "README.md").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"    {package}/ "))
    found: set[str] = set()
    for line in lines[first + 1 :]:
        if not line.startswith("      "):
            break
        names = line[6:].split("  ")[0]  # before what it is; a line of words alone has none
        found |= set(re.findall(r"[\w*]+\.py", names))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_in_the_tree(package: str) -> None:
    modules = {path.name for path in (ROOT / package).glob("*.py")} - set(HIDDEN)
    named = listed(package)
    missing = sorted(m for m in modules if not any(fnmatch(m, name) for name in named))
    assert not missing, f"{package}/: say in the README's tree what these are"
    gone = sorted(n for n in named if not any(fnmatch(m, n) for m in modules))
    assert not gone, f"{package}/: the README's tree names files that are not there"
