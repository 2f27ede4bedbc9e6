"""A node in a process of its own that sends without end, until a test kills it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from node.network.service import Reply
from protocol import messages
from protocol.frames import Chunks
from protocol.limits import CHUNK_BYTES
from tests.support.loopback import node, run


async def update(request: messages.UpdateRequest, _: bytes) -> Reply:
    part = bytes(CHUNK_BYTES)
    parts = Chunks(2000 * CHUNK_BYTES, (part for _ in range(2000)))
    return Reply(messages.UpdateReply(block=request.block, round=request.round), parts)


async def main(folder: Path, join: list[str]) -> None:
    async with node(folder, "sender", join) as network:
        network.serve(messages.UpdateRequest, update, bulk=True)
        told = {"peer": network.peer_id.hex(), "p2pd": network.daemon.pid}
        print(json.dumps(told), flush=True)
        await asyncio.Future()


if __name__ == "__main__":
    run(main(Path(sys.argv[1]), sys.argv[2:]), limit_s=120.0)
