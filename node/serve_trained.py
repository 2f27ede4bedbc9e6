"""What a host trains it serves as well: each consensus of its block, as soon as there is one.

Decides when a version is built, that it is built beside the loop, and which runs cannot be served.
What serving is stands in `serving.py`; what a consensus is, in `replica.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import torch

from node.fetch import Quanta
from node.network import Network
from node.serve_host import built_module, new_template, versions_kept
from node.serving import BlockServer
from swarm.fixed_point import to_float
from swarm.model import Block
from swarm.run import Run

_log = logging.getLogger(__name__)


def why_not_served(run: Run) -> str | None:
    """The reason why hosts of this run only train, if there is one."""
    if run.training.objective == "edm":
        return "blocks of the edm objective need z at every position and cannot be served"
    return None


class TrainedServer:
    """One host's serving beside its training. `start` it, `offer` versions, `stop` it."""

    def __init__(self, network: Network, run_id: bytes, run: Run, threads: int | None) -> None:
        self.run, self.threads = run, threads
        self.server = BlockServer(network, run_id, run, versions_kept=versions_kept(run))
        self._template: tuple[int, Block] | None = None
        # Rounds may come faster than versions are built: then the oldest are not.
        self._offered: deque[tuple[int, int, Quanta]] = deque(maxlen=self.server.versions_kept)
        self._wake = asyncio.Event()
        self._builder: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.threads is not None:  # as many as the training may have, not all there are
            torch.set_num_threads(self.threads)
        self.server.start()
        self._builder = asyncio.create_task(self._build())

    async def stop(self) -> None:
        if self._builder is not None:
            self._builder.cancel()
            await asyncio.gather(self._builder, return_exceptions=True)
        await self.server.stop()

    def mute(self, muted: bool) -> None:
        """Take no sweeps, and say so to whoever asks; for a host that is over its budget."""
        self.server.muted = muted

    def offer(self, block: int, round_: int, weights: Quanta) -> None:
        """The consensus of a block as of a round, -1 before the first. Versions count from 0."""
        self._offered.append((block, round_ + 1, weights))
        self._wake.set()

    async def _build(self) -> None:
        while True:
            if not self._offered:
                self._wake.clear()
                await self._wake.wait()
            block, version, weights = self._offered.popleft()
            template = self._template_of(block)

            def build(template: Block = template, weights: Quanta = weights) -> tuple[bytes, Block]:
                return built_module(template, to_float(weights))

            try:
                digest, module = await asyncio.to_thread(build)
            except Exception as error:  # a fault of ours must not end the training
                _log.exception("a version could not be built", exc_info=error)
                continue
            self.server.serve_only(block)
            self.server.offer(block, version, digest, module)

    def _template_of(self, block: int) -> Block:
        """Made here and not in the thread: making a block draws from torch's one generator."""
        if self._template is None or self._template[0] != block:
            self._template = (block, new_template(self.run, block))
        return self._template[1]


def trained_server(
    network: Network, run_id: bytes, run: Run, threads: int | None, say: Callable[[str], None]
) -> TrainedServer | None:
    """The serving of a host that trains; None, and a word about it, where that cannot be."""
    reason = why_not_served(run)
    if reason is not None:
        say(f"{reason}: this host only trains")
        return None
    return TrainedServer(network, run_id, run, threads)
