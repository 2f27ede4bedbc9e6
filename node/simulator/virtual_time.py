"""An event loop whose time passes only when nothing is left to do: rounds of seconds in no time.

On a busy machine a round of real time may be over before its work is done, and a test that was
right yesterday fails. Here work takes no time, but for what is handed to a thread: that is done at
once in the loop itself and takes a fixed time. Waiting is what moves the clock. The same test gives
the same rounds on any machine.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_S = 0.02


class _Selector(selectors.DefaultSelector):
    def __init__(self, wait: Callable[[float], None]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("everybody waits, and nothing is left that could happen")
        if not ready and timeout:
            self._wait(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For work without sockets and processes."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        super().__init__(_Selector(self._pass))

    def time(self) -> float:
        return self._now_s

    def _pass(self, seconds: float) -> None:
        self._now_s += seconds

    # Looser types than the loop's own: what it is given is called at once, whatever it is.
    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Any, *arguments: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            result = function(*arguments)
        except Exception as error:
            future.set_exception(error)
        else:
            self.call_later(THREAD_S, _finish, future, result)
        return future


def _finish(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
