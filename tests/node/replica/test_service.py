"""What a replica answers: a snapshot that takes long to make again is made once for all who ask."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import numpy as np
import pytest

from node.log.consensus import Pin, Snapshot
from node.replica.service import _Answers


class SlowConsensus:
    """Takes until it may go on; counts how often the work was begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = threading.Event()
        self.fails = False

    def snapshot_weights(self, log: Any, snapshot: Snapshot) -> Any:
        self.begun += 1
        assert self.go_on.wait(20.0)
        if self.fails:
            raise OSError("broken")
        return np.arange(10, dtype=np.int32)


async def nobody(signed: Any, asker: bytes) -> list[Any]:
    return []


def snapshot(number: int) -> Snapshot:
    return Snapshot(Pin(3, bytes([number]) * 32, bytes([number]) * 32), b"index")


def answering(consensus: SlowConsensus) -> Any:
    answers = _Answers(cast(Any, None), nobody, lambda: 0.0, lambda block: None)
    return lambda of: answers._made_again(cast(Any, None), cast(Any, consensus), of)


@pytest.mark.parametrize("fails", [False, True])
def test_a_snapshot_is_made_once_however_many_lose_patience(fails: bool) -> None:
    """The handler has a deadline and the thread has none: each retry began the work anew."""

    async def main() -> None:
        consensus = SlowConsensus()
        consensus.fails = fails
        made_again = answering(consensus)
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await made_again(snapshot(1))
        assert consensus.begun == 1
        patient = asyncio.create_task(made_again(snapshot(1)))
        other = asyncio.create_task(made_again(snapshot(2)))
        await asyncio.sleep(0.02)
        assert consensus.begun == 1  # one thread at a time
        consensus.go_on.set()
        if fails:
            with pytest.raises(OSError, match="broken"):
                await patient
            with pytest.raises(OSError, match="broken"):
                await other
        else:
            shards = await patient
            assert b"".join(shards) == np.arange(10, dtype="<i4").tobytes()
            assert await other == shards
        assert consensus.begun == 2

    async def bounded() -> None:
        async with asyncio.timeout(20.0):
            await main()

    asyncio.run(bounded())
