"""Assembly: the latest consensus of every block, pulled and checked, put together into one model.

Decides which version of each block belongs into the model: the last block newest, the others as
its workers read them (`swarm.coupling`). It trains nothing and never has to be reachable. A block
without a replica is named; the model can be assembled without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from node.fetch import FetchError, Peers
from node.follow import Donors, Follower, FollowSettings
from protocol.errors import BlockswarmError, WireError
from protocol.messages import Purpose
from swarm.composition import ComposedModel
from swarm.coupling import composed_versions
from swarm.flat import flat_size, initial_flat, load_flat
from swarm.model import Block
from swarm.runfile import RunFile
from swarm.updates import UpdateCodec
from swarm.worker import initial_block


class BlockMissing(BlockswarmError):
    """A block that no replica serves."""


@dataclass(frozen=True)
class Assembled:
    """The model, and for each block what is known of it."""

    model: ComposedModel
    versions: list[int | None]
    facts: list[dict[str, Any]]


class Assembler:
    """Follows the logs of all blocks."""

    def __init__(
        self,
        run_file: RunFile,
        run_id: bytes,
        peers: Peers,
        donors: Donors,
        say: Callable[[str], None],
    ) -> None:
        self.run_file, self.run, self.say = run_file, run_file.run, say
        self.followers = [
            Follower(
                FollowSettings(
                    run_id,
                    block,
                    UpdateCodec(run_file.exchange.codec, flat_size(initial_block(self.run, block))),
                    run_file.exchange.snapshot_every,
                    Purpose.ASSEMBLY,
                ),
                initial_flat(self.run, block),
                peers,
                donors,
            )
            for block in range(self.run.model.blocks)
        ]

    async def pull(self, leave_out: Sequence[int] = (), allow_missing: bool = False) -> Assembled:
        """Bring every block to its version and compose. Works while replicas come and go."""
        staggered = self.run.model.relays and self.run.training.staggered
        newest = await self._newest(leave_out)
        wanted = composed_versions(len(self.followers), newest + 1, staggered)
        missing = set(leave_out)
        for block, follower in enumerate(self.followers):
            if block in missing:
                continue
            try:
                await follower.advance(wanted[block] - 1)
            except (WireError, TimeoutError) as error:
                if follower.round < 0 and not allow_missing:
                    raise BlockMissing(
                        f"block {block} has no replica that answers ({error})",
                        f"wait for one, or leave it out with --without {block}",
                    ) from error
                if follower.round < 0:
                    missing.add(block)
                self.say(f"block {block}: {error}; using round {follower.round}")
        return self._compose(missing)

    async def _newest(self, leave_out: Sequence[int]) -> int:
        """The newest round of the last block that is there."""
        present = [f for b, f in enumerate(self.followers) if b not in leave_out]
        last = present[-1]
        # A probe: the last block moves to its newest version, which is the one it needs.
        for attempt in range(3):
            try:
                await last.advance()
                return last.round
            except FetchError:
                if attempt == 2:
                    break
                await asyncio.sleep(1.0 + attempt)
        return max(follower.round for follower in present)

    def _compose(self, missing: set[int]) -> Assembled:
        blocks: list[Block | None] = []
        versions: list[int | None] = []
        facts: list[dict[str, Any]] = []
        for index, follower in enumerate(self.followers):
            if index in missing:
                blocks.append(None)
                versions.append(None)
                continue
            block = initial_block(self.run, index)
            load_flat(block, follower.weights())
            block.requires_grad_(False)
            blocks.append(block.to(torch.device("cpu")))
            versions.append(follower.round)
            head = follower.log.head
            senders = {c.sender for e in follower.log.entries for c in e.contributions if c.scale}
            facts.append(
                {
                    "block": index,
                    "round": head.round,
                    "consensus": head.digest.hex(),
                    "contributors": sorted(senders),
                }
            )
        return Assembled(ComposedModel(self.run, blocks), versions, facts)
