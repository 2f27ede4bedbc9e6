"""Check that the packages `protocol`, `swarm` and `node` are ours.

The names are plain words: another distribution, or the folder where Python was started, may have
packages of the same name. Importing this module runs the check, so that a person reads an error
message before the rest of the command line fails to import. Uses the standard library alone.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "blockswarm"
# A file in each that no other project is likely to have there.
MARKS = {"protocol": "SPEC_CODECS.md", "swarm": "runfile.py", "node": "machine/own_packages.py"}


@dataclass(frozen=True)
class Foreign:
    """A package that is not ours: its folder, and the distributions that it may belong to."""

    name: str
    place: str
    owners: tuple[str, ...] = ()

    @property
    def fixes(self) -> tuple[str, ...]:
        folder = Path(self.place).parent
        steps = [f"pip uninstall {owner}" for owner in self.owners]
        if not steps:
            steps.append(
                f"start blockswarm in another folder than {folder}, and take {folder} out of "
                "PYTHONPATH if it is there"
            )
        alone = "give blockswarm an environment of its own: python3.11 -m venv blockswarm-venv"
        return (*steps, f'{alone}; blockswarm-venv/bin/pip install "blockswarm[host]"')


def place_of(name: str) -> str:
    """The folder that a top-level package is imported from; "" if there is no such package."""
    module = sys.modules.get(name)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return (spec.origin or "") if spec is not None else ""
    return str(Path(next(iter(spec.submodule_search_locations))).resolve())


def foreign(name: str) -> Foreign | None:
    """The package if it is another project's (elsewhere, or without our marker file), else None."""
    place = place_of(name)
    own = Path(__file__).resolve().parents[2] / name
    if place and Path(place) == own and (own / MARKS[name]).is_file():
        return None
    return Foreign(name, place or "nowhere", owners_of(name))


def owners_of(name: str) -> tuple[str, ...]:
    """Other installed distributions that have a package of this name."""
    found = importlib.metadata.packages_distributions().get(name, [])
    return tuple(sorted({owner for owner in found if owner.lower() != DISTRIBUTION}))


def refuse(found: Foreign) -> None:
    """Print what is wrong and what to try, and exit with code 2."""
    print(
        f"error: the package `{found.name}` that Python finds is not blockswarm's: {found.place}",
        file=sys.stderr,
    )
    print(f"  try: {found.fixes[0]}", file=sys.stderr)
    sys.exit(2)


for _name in ("protocol", "swarm"):  # `node` is where this file is
    if (_found := foreign(_name)) is not None:
        refuse(_found)
