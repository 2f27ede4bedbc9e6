"""One event loop for a process: uvloop where it exists, and SIGTERM ends it as Ctrl-C does.

Knows nothing of what runs on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where it exists. SIGTERM ends it like Ctrl-C: what it began is cleaned up."""
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
            # A loop that is closed would leave its handler behind, and nobody would be stopped.
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(signal.SIGTERM, usual)
