"""What the benchmark of a live node watches: stalls of its event loop, memory."""

from __future__ import annotations

import asyncio
import os
import time

from benchmarks import node


def test_a_stall_counts_as_all_the_ticks_that_it_swallowed() -> None:
    probe = node.Probe()

    async def main() -> None:
        probing = asyncio.create_task(probe.run())
        await asyncio.sleep(2 * node.TICK_S)
        time.sleep(0.2)  # noqa: ASYNC251 (the stall)
        await asyncio.sleep(2 * node.TICK_S)
        probing.cancel()

    asyncio.run(main())
    assert max(probe.late_s) > 0.15
    assert sum(late > node.TICK_S for late in probe.late_s) > 25


def test_the_memory_of_a_process_is_counted_with_its_children() -> None:
    assert node.pss_bytes(os.getpid()) > 10 << 20
