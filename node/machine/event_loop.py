"""Run a process's event loop: uvloop where it exists. SIGTERM ends it as Ctrl-C does."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end. On SIGTERM cancel it, let it clean up, raise KeyboardInterrupt."""
    factory, asked = None, False
    usual = signal.getsignal(signal.SIGTERM)

    async def until_asked() -> T:
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            nonlocal asked
            asked = True
            task.cancel()

        # As with Ctrl-C: not in another thread than the main one, and not on Windows.
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        return await work

    if sys.platform != "win32":
        with contextlib.suppress(ImportError):
            import uvloop

            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        try:
            return runner.run(until_asked())
        except asyncio.CancelledError:
            if asked:
                raise KeyboardInterrupt from None
            raise
        finally:
            # A closed loop leaves its handler installed, and SIGTERM would then do nothing.
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(signal.SIGTERM, usual)
