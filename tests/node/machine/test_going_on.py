"""Loops that go on: what was foreseen is silent, what was not is seen, cancellation passes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from node.machine import going_on as module
from node.machine.going_on import going_on
from protocol.errors import WireError

_log = logging.getLogger("a.loop")


def test_an_unforeseen_error_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_said", {})
    for error in (WireError("foreseen"), UnicodeError("not"), UnicodeError("nor"), KeyError("x")):
        with going_on(_log, "a thing", WireError):
            raise error
    assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [UnicodeError, KeyError]
    assert all(r.levelno == logging.ERROR for r in caplog.records)
    for kind in module._said:
        module._said[kind] -= module.SAY_AGAIN_S
    with going_on(_log, "a thing"):
        raise UnicodeError("again")
    assert len(caplog.records) == 3


def test_cancellation_passes() -> None:
    async def main() -> None:
        with going_on(_log, "a thing"):
            await asyncio.sleep(60)

    async def cancelled() -> None:
        task = asyncio.create_task(main())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
