"""What options and arguments of several commands have in common: what is accepted as typed.

Decides which numbers are numbers, what is taken for an address, and that mistakes which can be seen
without a network are told before anything is started. Imports nothing heavy.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

LARGEST = 1e12  # more is a slip of the finger, and in bytes it is still a finite number


class PathOption(click.Path):
    """A file or folder. An empty name, as of an unset variable, is not the current folder."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(path_type=Path, **settings)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("The name is empty; the current folder is `.`.", param, ctx)
        return super().convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A range of numbers that leaves out infinity and "not a number", which no bound refuses."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number) or abs(number) > LARGEST:
            self.fail(f"{value} is not a number that makes sense here.", param, ctx)
        return number


def meant_as_address(text: str) -> bool:
    """Whether a word is an address, perhaps one that is not whole, rather than a file."""
    return text.startswith(("/ip4/", "/ip6/", "/dns")) and not Path(text).exists()
