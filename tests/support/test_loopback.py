"""The frame of the live tests: what a test leaves behind is named, and nothing waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from tests.support.loopback import run


def test_a_handle_that_is_left_open_is_named_and_not_waited_for() -> None:
    """With warnings as errors uvloop waited for it for ever, and nobody learnt for which one."""
    started: list[int] = []

    async def main() -> None:
        started.append((await asyncio.create_subprocess_exec("sleep", "600")).pid)

    began_s = time.monotonic()
    try:
        with pytest.raises(AssertionError, match="UVProcessTransport"):
            run(main())
        assert time.monotonic() - began_s < 60
    finally:
        os.kill(started[0], signal.SIGKILL)
        os.waitpid(started[0], 0)
