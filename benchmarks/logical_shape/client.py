"""The client of the logical-shape benchmark, on a host of its own; JSON lines tell what to write.

Started by `process`. One order in, what became of it out, with the time of every
piece. Everything goes through the same classes as `blockswarm generate`. Decides nothing that is
measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from node.machine.event_loop import run_loop
from node.network.client import visit
from node.serving.client import SweepClient
from node.serving.output import Order, Output
from protocol.errors import BlockswarmError
from protocol.limits import SWEEP_HOP_MAX_S
from swarm.runfile import parse, run_id
from swarm.writing.generate import Sampling


async def write(client: SweepClient, asked: dict[str, Any]) -> dict[str, Any]:
    """One output, or why there is none. `pieces_s`: when each piece was there."""
    order = Order(
        bytes.fromhex(asked["prompt"]),
        asked["length"],
        Sampling(1.0, 0, asked["seed"]),
        drafts=1,
        draft_length=0 if asked["mode"] == "autoregressive" else None,
        joint=asked["mode"] == "denoise",
    )
    output = Output(client, order)
    written, pieces_s, error = b"", [], ""
    began_s = time.monotonic()
    try:
        async for piece in output.write():
            written += piece
            pieces_s.append(time.monotonic() - began_s)
    except BlockswarmError as trouble:
        error = str(trouble)
    figures = output.figures
    return {
        "bytes": len(written),
        "seconds": time.monotonic() - began_s,
        "pieces_s": pieces_s,
        "traversals": figures.traversals,
        "retries": figures.failures,
        "missing": list(figures.missing),
        "error": error,
    }


async def serve(address: str) -> None:
    async with visit([address], _say) as (text, network):
        # A slow host is not a dead one here: one pass may take minutes.
        client = SweepClient(network, run_id(text), parse(text).run, _say, SWEEP_HOP_MAX_S)
        try:
            print(json.dumps({"ready": True}), flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps(await write(client, json.loads(line))), flush=True)
        finally:
            await client.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        run_loop(serve(argv[0]))
