"""A Ctrl-C while torch is imported ends the process at once, and not by SIGABRT.

An interrupt that is raised as an exception inside the start of torch's C++ library aborts the
process. Importing torch takes seconds, so that is no rare moment. It does not wait either: nothing
has begun yet that would have to be ended in order, but for what was named by `before_stop`.
Decides nothing else; torch is imported wherever it is needed, through this hook.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

GUARDED = "torch"
STOPPED = 130

_before_stop: dict[Callable[[], None], None] = {}


class _Guard:
    """Finds torch like Python's own finder, and has it loaded with no exception from outside."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != GUARDED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Guarded(spec.loader)
        return spec


class _Guarded(Loader):
    """Loads a module by its own loader, and leaves that in its place."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with _stopped_at_once():
            self._loader.exec_module(module)


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """Whoever has a handler of its own keeps it: that one raises nothing where it is called."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: _stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop() -> None:
    for action in _before_stop:
        action()
    print("\nstopped", file=sys.stderr, flush=True)
    os._exit(STOPPED)


def before_stop(action: Callable[[], None]) -> None:
    """What is to be done before the process ends inside the import. Once, however often named."""
    _before_stop[action] = None


def guard_torch() -> None:
    """Before the first import of torch; afterwards it changes nothing."""
    if GUARDED not in sys.modules and not any(isinstance(f, _Guard) for f in sys.meta_path):
        sys.meta_path.insert(0, _Guard())
