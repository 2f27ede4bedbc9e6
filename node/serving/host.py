"""A host that only serves: it gets blocks, offers them to `server`, and announces itself.

Blocks come from a model folder, or from a run in training whose log it follows. Serving beside
training is in `trained`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from node.local.model_folder import load_model, tensors_digest
from node.log.fetch import Peers
from node.log.follow import Follower, FollowSettings
from node.network.network import Network, NetworkSettings
from node.network.peers import NetworkPeers
from node.network.service import Status
from node.serving.server import VERSIONS_KEPT, BlockServer
from protocol.errors import ModelError, UsageError, WireError
from protocol.frames import content_digest
from protocol.identity import peer_text
from protocol.messages import Purpose
from protocol.records import Record, Role
from swarm.consensus.updates import UpdateCodec
from swarm.learning.composition import ComposedModel
from swarm.learning.flat import Floats, flat_size, initial_flat, load_flat
from swarm.learning.model import Block, block_of
from swarm.learning.worker import initial_block
from swarm.run import Run
from swarm.run_template import emit
from swarm.runfile import DataRules, ExchangeRules, RoundSchedule, RunFile, parse, run_id

_log = logging.getLogger(__name__)

ANNOUNCE_EVERY_S = 60.0  # a record lives for 300
FOLLOW_MIN_S = 2.0


@dataclass(frozen=True)
class ModelFolder:
    """A loaded model folder, and the run file under which it is served on the network."""

    model: ComposedModel
    digests: dict[int, bytes]
    versions: dict[int, int]
    run_file: bytes


def open_folder(folder: Path, device: torch.device) -> ModelFolder:
    """Load a model folder for serving. Equal folders get equal run ids on every machine."""
    model, manifest = load_model(folder, device)
    if model.composition != "logit":
        raise ModelError(
            f"{folder} composes in embedding space, which cannot be served in sweeps",
            "fit its composition in logit space",
        )
    digests = {int(e["block"]): bytes.fromhex(e["digest"]) for e in manifest["blocks"]}
    versions = {int(e["block"]): max(0, int(e["version"] or 0)) for e in manifest["blocks"]}
    for block in model.blocks:
        if block is not None:
            block.requires_grad_(False)
    return ModelFolder(model, digests, versions, run_file_of(model.run, digests))


def run_file_of(run: Run, digests: dict[int, bytes]) -> bytes:
    """A run file for a trained model, with all its rounds in the past.

    The run's name contains a hash of the weights, so other weights are another run.
    """
    name = content_digest(b"".join(digests[block] for block in sorted(digests))).hex()[:16]
    blocks = run.model.blocks
    training = run.training
    count = max(1, training.steps // training.steps_per_round)
    training = replace(training, steps=count * training.steps_per_round)
    rounds = RoundSchedule(1, 60.0, count, 1.0, 4.0, 1.0, 1.5)
    exchange = ExchangeRules("topk:0.02:2", min(256, max(16, blocks)), 1)
    served = replace(run, training=training)
    return emit(RunFile(f"model-{name}", served, DataRules("own", ""), rounds, exchange))


class ServedModel(Protocol):
    """A source of block versions."""

    async def feed(self, server: BlockServer) -> None:
        """Offer all versions to the server, new ones as they appear, until cancelled."""


class FolderSource:
    """Blocks of a model folder, offered once."""

    def __init__(self, folder: ModelFolder, blocks: Sequence[int]) -> None:
        self.folder, self.blocks = folder, blocks

    async def feed(self, server: BlockServer) -> None:
        for index in self.blocks:
            module = self.folder.model.blocks[index]
            if module is None:
                raise UsageError(f"the model folder has no block {index}", "choose another --block")
            server.offer(index, self.folder.versions[index], self.folder.digests[index], module)


class RunSource:
    """Blocks of a run in training: follows their logs and offers each new version."""

    def __init__(
        self,
        run_file: RunFile,
        run_id: bytes,
        network: Network,
        peers: Peers,
        blocks: Sequence[int],
        device: torch.device,
    ) -> None:
        self.run_file, self.network, self.device = run_file, network, device
        run = run_file.run
        self.templates = {block: new_template(run, block) for block in blocks}
        self.followers = {
            block: Follower(
                FollowSettings(
                    run_id,
                    block,
                    UpdateCodec(run_file.codecs, flat_size(initial_block(run, block))),
                    run_file.exchange.snapshot_every,
                    Purpose.SERVING,
                ),
                initial_flat(run, block),
                peers,
                self._donors,
            )
            for block in blocks
        }

    async def _donors(self, block: int) -> Sequence[str]:
        found = await self.network.replicas(block, cap=8)
        training = [s for s in found if s.record.role & Role.REPLICA]
        return [peer_text(s.peer_id) for s in training]

    async def feed(self, server: BlockServer) -> None:
        while True:
            for block, follower in self.followers.items():
                try:
                    moved = await follower.advance()
                except (WireError, TimeoutError) as error:
                    _log.info("block %d stays at round %d: %s", block, follower.round, error)
                    continue
                if moved:
                    version, weights = follower.round + 1, follower.weights()
                    template = self.templates[block]
                    digest, module = await asyncio.to_thread(
                        built_module, template, weights, self.device
                    )
                    server.offer(block, version, digest, module)
            await asyncio.sleep(max(FOLLOW_MIN_S, self.run_file.rounds.period_s / 2))


def new_template(run: Run, block: int) -> Block:
    """A block of the run's shape, whose weights are to be overwritten."""
    return block_of(run, block).requires_grad_(False)


def built_module(
    template: Block, flat: Floats, device: torch.device | str = "cpu"
) -> tuple[bytes, Block]:
    """A module with these weights, and their digest. Thread-safe: it draws no random numbers."""
    module = copy.deepcopy(template)
    return loaded_digest(module, flat), module.to(device)


def loaded_digest(module: Block, flat: Floats) -> bytes:
    """Set a module's weights and return their digest."""
    load_flat(module, flat)
    return bytes.fromhex(tensors_digest(module.state_dict()))


def serve_weights(server: BlockServer, block: int, version: int, flat: Floats) -> None:
    """Offer a block's weights as a version, building the module at once."""
    digest, module = built_module(new_template(server.run, block), flat)
    server.offer(block, version, digest, module)


def versions_kept(run: Run) -> int:
    """How many versions of a block to keep. Staggered ones reach back a round per block; one more
    is for requests under way."""
    staggered = run.model.relays and run.training.staggered
    return max(VERSIONS_KEPT, run.model.blocks + 1) if staggered else VERSIONS_KEPT


@dataclass(frozen=True)
class ServeSettings:
    """A user's settings for a host that serves."""

    network: NetworkSettings
    blocks: tuple[int, ...]
    device: torch.device
    folder: ModelFolder | None = None


class ServingHost:
    """A host that only serves. `run` it until it is cancelled."""

    def __init__(self, settings: ServeSettings, say: Callable[[str], None]) -> None:
        self.settings, self.say = settings, say
        self.run_file = parse(settings.network.run_file)
        self.run_id = run_id(settings.network.run_file)
        check_blocks(self.run_file.run, settings.blocks)
        self.network = Network(settings.network, self._status, say)
        self.announced = asyncio.Event()  # set when others can find us
        self.new_blocks: asyncio.Queue[int] = asyncio.Queue()  # blocks as their first version comes

    def _status(self) -> Status:
        return Status(int(Role.SERVER), 0, self.settings.blocks[:64])

    async def run(self) -> None:
        folder, run = self.settings.folder, self.run_file.run
        async with self.network:
            composed: dict[str, Any] = {"versions_kept": versions_kept(run)}
            if folder is not None:
                composed |= {
                    "weights": folder.model.weights,
                    "temperature": folder.model.temperature,
                }
            server = BlockServer(self.network, self.run_id, run, **composed)
            server.new_block = self.new_blocks.put_nowait
            server.start()
            try:
                await self._serve(server)
            finally:
                await server.stop()

    async def _serve(self, server: BlockServer) -> None:
        feeding = asyncio.create_task(self._source().feed(server))
        announcing = asyncio.create_task(self._announce())
        try:
            done, _ = await asyncio.wait({feeding, announcing}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in (feeding, announcing):
                task.cancel()
            await asyncio.gather(feeding, announcing, return_exceptions=True)

    def _source(self) -> ServedModel:
        if self.settings.folder is not None:
            return FolderSource(self.settings.folder, self.settings.blocks)
        settings, peers = self.settings, NetworkPeers(self.network)
        return RunSource(
            self.run_file, self.run_id, self.network, peers, settings.blocks, settings.device
        )

    async def _announce(self) -> None:
        """Announce that we serve, again and again since records expire."""
        while True:
            for block in self.settings.blocks:
                record = Record(
                    run=self.run_id, role=int(Role.SERVER), block=block, round=0, sequence=0
                )
                with suppress(WireError):  # nobody there yet to keep it
                    await self.network.announce(record)
            self.announced.set()
            await asyncio.sleep(ANNOUNCE_EVERY_S)


def check_blocks(run: Run, blocks: Sequence[int]) -> None:
    for block in blocks:
        if not 0 <= block < run.model.blocks:
            raise UsageError(
                f"there is no block {block}", f"choose one of 0 to {run.model.blocks - 1}"
            )
