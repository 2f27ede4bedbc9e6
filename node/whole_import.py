"""torch is imported whole or not at all: a Ctrl-C meanwhile waits until it is there.

An interrupt that is raised inside the start of its C++ library ends the process by SIGABRT instead
of an exception. Importing torch takes seconds, so that is no rare moment. Decides nothing else;
torch itself is imported wherever it is needed, through this hook.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from node.terminal import no_interrupts

GUARDED = "torch"


class _Guard:
    """Finds torch like Python's own finder, and lets it be loaded without interrupts."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != GUARDED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Uninterrupted(spec.loader)
        return spec


class _Uninterrupted(Loader):
    """Loads a module by its own loader, and leaves that in its place."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with no_interrupts():
            self._loader.exec_module(module)


def guard_torch() -> None:
    """Before the first import of torch; afterwards it changes nothing."""
    if GUARDED not in sys.modules and not any(isinstance(f, _Guard) for f in sys.meta_path):
        sys.meta_path.insert(0, _Guard())
