"""A host of the logical-shape benchmark: `blockswarm serve --model --block`, with a made-up folder.

Started by `process`. Decides what is made in the place of a model folder, and that
the seconds of the block's layers go to a file. Serving, network and streams are the product's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.logical_shape.matmul import Ways
from benchmarks.logical_shape.model import BLOCKS, SHAPES, SPENT, LogicalShape, Spent, shared_block
from node.commands.serve import until_stopped
from node.console.terminal import say
from node.machine.device import make_deterministic
from node.machine.event_loop import run_loop
from node.network.daemon import DaemonSettings
from node.network.network import NetworkSettings
from node.serving.host import ModelFolder, ServeSettings, ServingHost, run_file_of
from node.serving.server import BlockServer
from swarm.learning.composition import ComposedModel
from swarm.learning.model import Block
from swarm.runfile import run_id

SESSION_S = 1800.0  # in the place of 60: a traversal alone may take longer


class PatientHost(ServingHost):
    """Its clients think for as long as all hosts compute."""

    async def _serve(self, server: BlockServer) -> None:
        server.sessions.idle_s = SESSION_S
        await super()._serve(server)


def served_folder(shape: LogicalShape, block: int, module: Block) -> ModelFolder:
    """What `blockswarm serve --model` reads from a folder: one block, the others as shapes only."""
    run = shape.run
    with torch.device("meta"):
        others = [Block(run.model, "bayes", b == 0, run.denoises) for b in range(BLOCKS)]
    blocks = [module if b == block else others[b] for b in range(BLOCKS)]
    digests = {b: shape.digest(b) for b in range(BLOCKS)}
    versions = dict.fromkeys(range(BLOCKS), 0)
    return ModelFolder(ComposedModel(run, blocks), digests, versions, run_file_of(run, digests))


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="logical_shape.process host")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("block", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("few", help="how a token's pass multiplies")
    parser.add_argument("many", help="how all other passes do")
    parser.add_argument("--join", action="append", default=[])
    return parser.parse_args(argv)


def writer(path: Path) -> Spent:
    """Appends a line for every pass through the block."""

    def spent(positions: int, seconds: float, cpu_s: float) -> None:
        line = {"positions": positions, "seconds": seconds, "cpu_s": cpu_s}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    return spent


def main(argv: Sequence[str]) -> None:
    options = options_of(argv)
    make_deterministic(1)
    shape, folder = SHAPES[options.shape], options.folder
    module = shared_block(shape, options.block, Ways(options.few, options.many))
    module.spent = writer(folder / SPENT)
    served = served_folder(shape, options.block, module)
    text = served.run_file
    daemon = DaemonSettings(folder / "identity", port=options.port)
    network = NetworkSettings(daemon, run_id(text), text, join=tuple(options.join))
    settings = ServeSettings(network, (options.block,), torch.device("cpu"), served)

    async def serve() -> None:
        await until_stopped(PatientHost(settings, say))

    run_loop(serve())
