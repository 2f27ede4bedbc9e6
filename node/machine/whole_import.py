"""Make Ctrl-C during `import torch` end the process at once, and not by SIGABRT.

A KeyboardInterrupt raised while torch's C++ library initialises aborts the process, and importing
torch takes seconds. An import hook therefore exits directly on Ctrl-C, wherever torch is imported:
nothing has to be shut down yet but what was registered by `before_stop`.
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
    """Finds torch like Python's own finder, and wraps its loader in `_Guarded`."""

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
    """Loads a module by its original loader under the guard, and then restores that loader."""

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
    """Exit on SIGINT inside the context, unless a handler other than Python's is installed."""
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
    """Register an action to run before the process exits from inside the import."""
    _before_stop[action] = None


def guard_torch() -> None:
    """Install the hook. To be called before the first import of torch, else without effect."""
    if GUARDED not in sys.modules and not any(isinstance(f, _Guard) for f in sys.meta_path):
        sys.meta_path.insert(0, _Guard())
