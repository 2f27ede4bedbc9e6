"""What a newcomer of a block begins with: the block's newest consensus, wherever it is to be had.

Steps on any other weights would be worse than none: what they learned goes into the next updates.
Decides whom to ask and which consensus to believe: the newest that most of those asked have, as
any follower does. They are the block's hosts; if it has lost them all, with relay and look-ahead
the hosts that follow its log and serve their copies. With independent blocks nobody has a copy,
and such a block begins anew.

Known limit: of a lost block nobody is left who signed that consensus. Whoever answers is believed
by majority, and a block without hosts in a swarm full of liars is theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from node.host.block_choice import hosts_of
from node.log.fetch import Peers
from node.log.follow import Follower, FollowSettings
from node.network.network import Network
from protocol.errors import WireError
from protocol.messages import Purpose
from swarm.consensus.updates import UpdateCodec
from swarm.learning.flat import flat_size, initial_flat
from swarm.learning.worker import initial_block
from swarm.runfile import RunFile

SEARCH_S = 30.0
FETCH_S = 600.0  # a large block over a slow link; who asks for each part has deadlines of its own
ENOUGH_DONORS = 4


async def first_consensus(
    network: Network,
    peers: Peers,
    run_file: RunFile,
    block: int,
    number: int,
    followed: Mapping[int, Follower],
) -> Follower:
    """The newest consensus of a block that can be had; the run's first weights if there is none.

    `followed`: copies that this host has already.
    """
    run, exchange = run_file.run, run_file.exchange
    settings = FollowSettings(
        network.settings.run_id,
        block,
        UpdateCodec(run_file.codecs, flat_size(initial_block(run, block))),
        exchange.snapshot_every,
        Purpose.CATCH_UP,
        to_train=True,
    )
    found = Follower(settings, initial_flat(run, block), peers, _nobody)
    await bring_up(found, network, run_file, number)
    ours = followed.get(block)
    return ours if ours is not None and ours.round > found.round else found


async def bring_up(found: Follower, network: Network, run_file: RunFile, number: int) -> None:
    """Move it to the newest consensus that can be had; if there is none it stays where it is."""
    donors = await _who_has_it(network, run_file, found.settings.block, number)

    async def known(_: int) -> Sequence[str]:
        return donors

    found.donors = known
    if donors:
        with suppress(WireError, TimeoutError):
            async with asyncio.timeout(FETCH_S):
                await found.advance()


async def _nobody(block: int) -> Sequence[str]:
    return ()


async def _who_has_it(
    network: Network, run_file: RunFile, block: int, number: int
) -> Sequence[str]:
    """The block's hosts; or those that read it, of the next blocks and of the one before."""
    model = run_file.run.model
    ahead = [block - 1] if model.coupling == "look_ahead" else []
    readers = (block + 1, *ahead, *range(block + 2, model.blocks)) if model.relays else ()
    found: list[str] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(SEARCH_S):
            for other in (block, *readers):
                if 0 <= other < model.blocks and len(found) < ENOUGH_DONORS:
                    with suppress(WireError):
                        found += await hosts_of(network, other, number)
                if other == block and found:
                    break
    return found
