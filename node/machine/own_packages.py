"""Are `protocol`, `swarm` and `node` the ones that belong together?

The three names are plain words: another distribution, or a folder beside which Python was started,
may have them too, and then half of this program is somebody else's. Importing this module is a
check in itself: a foreign package is told in words before the rest of the command line, which
cannot be imported then, ends in a traceback. Uses the standard library alone.
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
    """A package that is not ours: where it lies, and whose it is if that is known."""

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
    """The folder from which a top-level package is imported; "" if there is none."""
    module = sys.modules.get(name)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return (spec.origin or "") if spec is not None else ""
    return str(Path(next(iter(spec.submodule_search_locations))).resolve())


def foreign(name: str) -> Foreign | None:
    """Whether this package is another project's: not beside this file, or without its mark."""
    place = place_of(name)
    own = Path(__file__).resolve().parents[2] / name
    if place and Path(place) == own and (own / MARKS[name]).is_file():
        return None
    return Foreign(name, place or "nowhere", owners_of(name))


def owners_of(name: str) -> tuple[str, ...]:
    """Other installed distributions that bring a package of this name."""
    found = importlib.metadata.packages_distributions().get(name, [])
    return tuple(sorted({owner for owner in found if owner.lower() != DISTRIBUTION}))


def refuse(found: Foreign) -> None:
    """For a command that cannot go on."""
    print(
        f"error: the package `{found.name}` that Python finds is not blockswarm's: {found.place}",
        file=sys.stderr,
    )
    print(f"  try: {found.fixes[0]}", file=sys.stderr)
    sys.exit(2)


for _name in ("protocol", "swarm"):  # `node` is where this file is
    if (_found := foreign(_name)) is not None:
        refuse(_found)
