"""Serving beside training: a host offers every new consensus of the block that it trains.

A version's digest is computed at once, its module only when a sweep asks for it: several modules
would take as much memory as the training. Both happen in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from node.log.fetch import Quanta
from node.network.network import Network
from node.serving.host import built_module, loaded_digest, new_template, versions_kept
from node.serving.server import BlockServer, why_not_served
from swarm.consensus.fixed_point import to_float
from swarm.learning.model import Block
from swarm.run import Run

_log = logging.getLogger(__name__)

WeightsOf = Callable[[int], Quanta | None]  # round -> its consensus, or None if no longer held


class TrainedServer:
    """One host's serving beside its training. `start` it, `offer` versions, `stop` it."""

    def __init__(self, network: Network, run_id: bytes, run: Run, threads: int | None) -> None:
        self.run, self.threads = run, threads
        self.server = BlockServer(network, run_id, run, versions_kept=versions_kept(run))
        self._template: tuple[int, Block] | None = None
        # If rounds come faster than digests are computed the oldest versions are skipped.
        self._offered: deque[tuple[int, int, WeightsOf]] = deque(maxlen=self.server.versions_kept)
        self._wake = asyncio.Event()
        self._builder: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.threads is not None:  # the same limit as for the training
            torch.set_num_threads(self.threads)
        self.server.start()
        self._builder = asyncio.create_task(self._build())

    async def stop(self) -> None:
        if self._builder is not None:
            self._builder.cancel()
            await asyncio.gather(self._builder, return_exceptions=True)
        await self.server.stop()

    def mute(self, muted: bool) -> None:
        """Refuse new sweeps, or take them again; for a host that is over its budget."""
        self.server.muted = muted

    def offer(self, block: int, round_: int, weights_of: WeightsOf) -> None:
        """Offer the consensus of a block as of a round, -1 before the first. Versions count from 0.

        `weights_of` is called in a thread, now and whenever a sweep asks for the version.
        """
        self._offered.append((block, round_ + 1, weights_of))
        self._wake.set()

    async def _build(self) -> None:
        while True:
            if not self._offered:
                self._wake.clear()
                await self._wake.wait()
            block, version, weights_of = self._offered.popleft()
            offer = _Offer(self._template_of(block), version - 1, weights_of)
            try:
                digest = await asyncio.to_thread(offer.digest)
            except Exception as error:  # a fault of ours must not end the training
                _log.exception("a version could not be named", exc_info=error)
                continue
            if digest is not None:
                self.server.serve_only(block)
                self.server.offer(block, version, digest, partial(offer.build, digest))

    def _template_of(self, block: int) -> Block:
        """A block to copy. Made on the loop's thread: it draws from torch's global generator."""
        if self._template is None or self._template[0] != block:
            self._template = (block, new_template(self.run, block))
        return self._template[1]


@dataclass(frozen=True)
class _Offer:
    """A version of a block that can be rebuilt from its weights. Its methods run in a thread."""

    template: Block
    round: int
    weights_of: WeightsOf

    def digest(self) -> bytes | None:
        weights = self.weights_of(self.round)
        return None if weights is None else loaded_digest(self.template, to_float(weights))

    def build(self, digest: bytes) -> Block | None:
        weights = self.weights_of(self.round)
        if weights is None:
            return None
        found, module = built_module(self.template, to_float(weights))
        return module if found == digest else None


def trained_server(
    network: Network, run_id: bytes, run: Run, threads: int | None, say: Callable[[str], None]
) -> TrainedServer | None:
    """The server of a training host; None, with the reason told by `say`, if it cannot serve."""
    reason = why_not_served(run)
    if reason is not None:
        say(f"{reason}: this host only trains")
        return None
    return TrainedServer(network, run_id, run, threads)
