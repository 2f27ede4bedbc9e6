"""Health check: whether the swarm would answer now, and with which versions.

Hosts are asked directly, since what is known of them may be old; at most once every few seconds.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from node.serving.client import SweepClient
from protocol.errors import BlockswarmError, WireError
from protocol.frames import Busy
from protocol.serving import Hop, ServingReply, ServingRequest

LOOK_S, LOOK_EVERY_S, ASK_S = 20.0, 5.0, 5.0


class Health:
    def __init__(self, client: SweepClient, model: str) -> None:
        self.client, self.model = client, model
        self._looking = asyncio.Lock()
        self._looked_s = -LOOK_EVERY_S
        self._facts: dict[str, Any] = {}

    async def now(self) -> dict[str, Any]:
        """The health facts. `status` is ok, degraded (blocks are missing) or down (all are)."""
        async with self._looking:
            if time.monotonic() - self._looked_s > LOOK_EVERY_S:
                self._facts = await self._look()
                self._looked_s = time.monotonic()
        return self._facts

    async def _look(self) -> dict[str, Any]:
        reason, blocks = "no host answers", []
        try:
            async with asyncio.timeout(LOOK_S):
                route = await self.client.route((), {})
                blocks = await asyncio.gather(*(self._block(hop) for hop in route.hops))
        except TimeoutError:
            pass
        except BlockswarmError as error:
            reason = error.message
        there = {block["block"] for block in blocks if block["hosts"]}
        missing = [block for block in range(self.client.run.model.blocks) if block not in there]
        facts = {
            "status": "down" if not there else "degraded" if missing else "ok",
            "model": self.model,
            "run": self.client.run_id.hex(),
            "missing_blocks": missing,
            "blocks": [block for block in blocks if block["hosts"]],
        }
        return facts if there else {**facts, "reason": reason}

    async def _block(self, hop: Hop) -> dict[str, Any]:
        """The version served of a block, and how many hosts with it answer."""
        have = {o.peer: v for o in self.client.offers for v in o.versions if v.digest == hop.digest}
        answers = await asyncio.gather(*(self._answers(peer) for peer in have))
        rounds = [version.round for version in have.values()]
        return {
            "block": hop.block,
            "version": hop.digest.hex(),
            "round": rounds[0] if rounds else None,
            "hosts": sum(answers),
        }

    async def _answers(self, peer: bytes) -> bool:
        question = ServingRequest(run=self.client.run_id)
        try:
            await self.client.network.request(peer, question, ServingReply, deadline_s=ASK_S)
        except Busy:
            return True
        except WireError:
            return False
        return True
