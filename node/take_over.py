"""A block that has lost all its hosts: where its newest consensus is to be had.

With relay and look-ahead other hosts follow the block's log, and serve their copies. Decides whom
to ask and which copy to believe: the newest that most of those asked have, as any follower does.
With independent blocks nobody has a copy, and the block begins anew.

Known limit: nobody is left who signed that consensus. Whoever answers is believed by majority, and
a block without hosts in a swarm full of liars is theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from node.block_choice import hosts_of
from node.fetch import Peers
from node.follow import Follower, FollowSettings
from node.network import Network
from protocol.errors import WireError
from protocol.messages import Purpose
from swarm.flat import flat_size, initial_flat
from swarm.runfile import RunFile
from swarm.updates import UpdateCodec
from swarm.worker import initial_block

SEARCH_S = 30.0
ENOUGH_DONORS = 4


async def copy_of_lost_block(
    network: Network,
    peers: Peers,
    run_file: RunFile,
    block: int,
    number: int,
    followed: Mapping[int, Follower],
) -> Follower | None:
    """The newest copy of a block, or None if it has hosts (they are asked as ever) or no copy."""
    run, exchange = run_file.run, run_file.exchange
    if not run.model.relays:
        return None
    with suppress(WireError, TimeoutError):
        async with asyncio.timeout(SEARCH_S):
            if await hosts_of(network, block, number):
                return None
    copy = followed.get(block)
    if copy is None:
        codec = UpdateCodec(exchange.codec, flat_size(initial_block(run, block)))
        settings = FollowSettings(
            network.settings.run_id, block, codec, exchange.snapshot_every, Purpose.CATCH_UP
        )
        copy = Follower(settings, initial_flat(run, block), peers, _nobody)

    async def donors(_: int) -> Sequence[str]:
        return await _followers_of(network, run_file, block, number)

    copy.donors = donors
    with suppress(WireError, TimeoutError):  # what we have will do
        async with asyncio.timeout(SEARCH_S):
            await copy.advance()
    return copy


async def _nobody(block: int) -> Sequence[str]:
    return ()


async def _followers_of(
    network: Network, run_file: RunFile, block: int, number: int
) -> Sequence[str]:
    """Hosts that read this block: those of the next blocks and of the one before, nearest first."""
    count = run_file.run.model.blocks
    ahead = [block - 1] if run_file.run.model.coupling == "look_ahead" else []
    found: list[str] = []
    for other in (block + 1, *ahead, *range(block + 2, count)):
        if 0 <= other < count and len(found) < ENOUGH_DONORS:
            with suppress(WireError):
                found += await hosts_of(network, other, number)
    return found
