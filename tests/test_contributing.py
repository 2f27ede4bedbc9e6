"""CONTRIBUTING.md tells the code's truth: the files that it names are there."""

from __future__ import annotations

import re

import pytest

from tests.support.house import doubles, ways
from tests.support.paths import ROOT

NAMED = re.findall(r"`((?:[\w-]+/)+[\w.]*)`", (ROOT / "CONTRIBUTING.md").read_text())


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_what_it_names_is_there(name: str) -> None:
    assert (ROOT / name).exists()


def test_both_ways_are_told() -> None:
    assert len(ways()) == 2
    assert all(steps <= 13 for steps, _ in ways().values())


def test_no_class_name_means_two_things() -> None:
    assert doubles("class") == {}
