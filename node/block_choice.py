"""Which block a host begins with: the one that was asked for, or the neediest that fits.

Reads the records of every block and asks `swarm.assignment`. A block is full at 16 hosts: more
would need groups, which the live node does not have yet; a person is told, not left out silently.
"""

from __future__ import annotations

import random
from contextlib import suppress

from node.network import Network
from protocol.errors import UsageError, WireError
from swarm.assignment import BlockView, HostLimits, first_choice
from swarm.groups import MAX_GROUP
from swarm.runfile import RunFile, worker_memory_bytes


async def choose_block(
    network: Network, run_file: RunFile, wanted: int | None, memory_bytes: int
) -> int:
    """Raises `UsageError` if there is no such block, none fits, or all are full."""
    count = run_file.run.model.blocks
    if wanted is not None and not 0 <= wanted < count:
        raise UsageError(
            f"there is no block {wanted}",
            f"choose one of 0 to {count - 1}, or leave --block away",
        )
    blocks = range(count) if wanted is None else (wanted,)
    views = [await _view(network, run_file, block) for block in blocks]
    places = [view for view in views if view.replicas < MAX_GROUP]
    if not places:
        raise UsageError(
            f"every block that you may train has {MAX_GROUP} hosts already",
            "more are not part of this version; start another run",
        )
    if wanted is not None:
        return wanted
    limits = HostLimits(memory_bytes, 1 << 60)
    chosen = first_choice(places, limits, random.Random(network.peer_id))
    if chosen is None:
        least = min(view.memory_bytes for view in places)
        raise UsageError(
            f"no block fits: the smallest worker needs {least / 1e9:.1f} GB of memory, "
            f"--max-memory allows {memory_bytes / 1e9:.1f} GB",
            "raise --max-memory, or join a smaller run",
        )
    return chosen


async def _view(network: Network, run_file: RunFile, block: int) -> BlockView:
    others = 0
    with suppress(WireError):  # nobody answers for it: then it needs us
        records = await network.replicas(block)
        others = sum(signed.peer_id != network.peer_id for signed in records)
    return BlockView(block, others, worker_memory_bytes(run_file, block), 0, 1)
