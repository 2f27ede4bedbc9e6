"""The loop of a process: its result, and how it is ended from outside."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from node.machine.event_loop import run_loop


def test_what_it_gives_and_what_it_runs_on() -> None:
    async def work() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run_loop(work()) == "uvloop"


def test_sigterm_ends_it_like_ctrl_c() -> None:
    """What the work began is cleaned up first."""
    left: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up may take a while
            left.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        run_loop(work())
    assert left == ["cleaned up"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "later ones end the process"


def test_who_cancels_itself_was_not_stopped() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_loop(work())
