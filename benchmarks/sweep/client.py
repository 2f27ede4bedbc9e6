"""A client of a swarm that serves, on a host of its own, told what to write by JSON lines.

    python -m benchmarks.sweep.client ADDRESS      (started by `benchmarks.sweep`)

One line in, a list of orders, how many of them at once, and whether what is known of the hosts'
latencies still holds; one line out, what became of each.
Everything goes through the same classes as `blockswarm generate`. Decides nothing that is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

from node.machine.event_loop import run_loop
from node.network.client import visit
from node.serving.client import SweepClient
from node.serving.output import Order, Output
from protocol.errors import BlockswarmError
from swarm.runfile import parse, run_id
from swarm.writing.generate import Sampling

Facts = dict[str, Any]


async def write(client: SweepClient, asked: Facts) -> Facts:
    """One output, or why there is none."""
    sampling = Sampling(asked["temperature"], 0, asked["seed"])
    order = Order(
        bytes.fromhex(asked["prompt"]),
        asked["length"],
        sampling,
        asked["drafts"],
        asked["draft_length"],
        joint=asked["joint"],
    )
    output = Output(client, order)
    output._left_out.update(asked["leave_out"])  # "host 1 alone" is no mode that people need
    began_s, written = time.monotonic(), b""
    error = ""
    try:
        async for piece in output.write():
            written += piece
    except BlockswarmError as trouble:
        error = str(trouble)
    figures = output.figures
    return {
        "hex": written.hex(),
        "seconds": time.monotonic() - began_s,
        "traversals": figures.traversals,
        "retries": figures.failures,
        "missing": list(figures.missing),
        "error": error,
    }


async def batch(client: SweepClient, asked: list[Facts], at_once: int) -> list[Facts]:
    """All of them, so many at the same time."""
    places = asyncio.Semaphore(at_once)

    async def one(order: Facts) -> Facts:
        async with places:
            return await write(client, order)

    return await asyncio.gather(*(one(order) for order in asked))


async def serve(address: str) -> None:
    async with visit([address], _say) as (text, network):
        client = SweepClient(network, run_id(text), parse(text).run, _say)
        try:
            print(json.dumps({"ready": True}), flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                asked = json.loads(line)
                if asked["look_again"]:
                    client.look_again()
                began_s = time.monotonic()
                done = await batch(client, asked["orders"], asked["at_once"])
                spent_s = time.monotonic() - began_s
                print(json.dumps({"outputs": done, "seconds": spent_s}), flush=True)
        finally:
            await client.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        run_loop(serve(sys.argv[1]))


if __name__ == "__main__":
    main()
