"""docs/design.md tells the code's truth, as far as it can be compared."""

from __future__ import annotations

import configparser
import re

from packaging.requirements import Requirement

from tests.support.paths import ROOT

DESIGN = (ROOT / "docs" / "design.md").read_text()


def test_the_libraries_are_those_that_are_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    wanted = (setup["options"]["install_requires"], extras["host"], extras["light"])
    installed = {Requirement(line).name for text in wanted for line in text.split("\n") if line}
    section = DESIGN.split("## Roles of the libraries\n")[1].split("\n## ")[0]
    assert set(re.findall(r"(?:^|[.] )(\w+): ", section.strip())) == installed


def test_the_files_that_it_names_are_there() -> None:
    named = re.findall(r"`((?:protocol|swarm|node|benchmarks|tests)/[\w/]*[\w.]*)`", DESIGN)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_tests_that_the_pages_name_are_there() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = {name for p in pages for name in re.findall(r"`(tests/[\w/]+\.py)`", p.read_text())}
    assert len(named) > 20
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
