"""A pull over the second transport: a hivemind node's p2pd sends, py-libp2p receives.

    python -m benchmarks.transport.light [--quick] [--out FILE]

Frames, digests and the ledger are on; sender and receiver are processes of their own, on loopback,
because the two libraries cannot share one. `light_row` is the row that stands beside p2pd's own
in `benchmarks.transport`.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from protocol.frames import Chunks, Deadline, content_digest
from protocol.limits import CHUNK_BYTES
from protocol.messages import UpdateReply, UpdateRequest, receive, send

NAME = "transport.light"
RUN = content_digest(b"benchmark")
PULLS = 3
MB = 1_000_000


def light_row(size_mb: int, pulls: int = PULLS) -> dict[str, Any]:
    """One row: the best of some pulls of `size_mb`, and the receiver's growth in memory."""
    module = [sys.executable, "-m", f"benchmarks.{NAME}"]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [*module, "serve", folder],
            cwd=harness.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with server:  # closes its stdin, at which it ends, and waits for it
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            pulled = subprocess.run(
                [*module, "pull", address, str(size_mb), str(pulls)],
                cwd=harness.ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=600,
            )
    measured = json.loads(pulled.stdout)
    best_s = min(measured["seconds"])
    return {
        "name": f"p2pd -> py-libp2p, {size_mb} MB",
        "size_mb": size_mb,
        "mb_per_s": round(size_mb / best_s, 2),
        "seconds": [round(s, 4) for s in measured["seconds"]],
        "receiver_cpu_s": round(min(measured["cpu_s"]), 4),
        "receiver_peak_mb": round(measured["peak_mb"], 1),
    }


# --- the sender: hivemind ------------------------------------------------------------------------


def random_parts(size_bytes: int) -> Iterator[memoryview]:
    """One random chunk over and over: making bytes must not be what is measured."""
    chunk = memoryview(os.urandom(CHUNK_BYTES))
    for start in range(0, size_bytes, CHUNK_BYTES):
        yield chunk[: min(CHUNK_BYTES, size_bytes - start)]


async def serve(folder: Path) -> None:
    from node.network.daemon import Daemon, DaemonSettings
    from node.network.p2pd_stream import P2pdStream
    from node.network.service import Reply, Service
    from node.network.transport import Caller
    from protocol.identity import load_or_create
    from protocol.ledger import Ledger

    async def update(request: UpdateRequest, _: bytes) -> Reply:
        size_bytes = request.round * MB  # the round stands for the size here
        parts = Chunks(size_bytes, random_parts(size_bytes))
        return Reply(UpdateReply(block=request.block, round=request.round), parts)

    service = Service(Ledger())
    service.serve(UpdateRequest, update, bulk=True)

    async def on_stream(stream: P2pdStream, caller: Caller) -> None:
        await service.on_stream(stream, caller.peer_id)

    identity = load_or_create(folder / "identity")
    settings = DaemonSettings(
        folder / "identity", hosts=("127.0.0.1",), reachability="public", map_port=False
    )
    daemon = await Daemon.start(settings)
    try:
        await daemon.transport.serve(on_stream)
        print(f"/ip4/127.0.0.1/tcp/{daemon.port}/p2p/{identity.text}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await daemon.stop()


# --- the receiver: py-libp2p ---------------------------------------------------------------------


async def pull(address: str, size_mb: int, pulls: int) -> dict[str, Any]:
    from node.network import light
    from protocol.ledger import Ledger

    ledger, seconds, cpu_s = Ledger(), [], []
    request = UpdateRequest(run=RUN, block=0, round=size_mb, digest=RUN)
    async with light.connect(light.parse_light_address(address), Deadline.after(15)) as peer:
        before_mb = _peak_mb()
        for _ in range(pulls):
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            async with await peer.open(Deadline.after(300)) as channel:
                await send(channel, request)
                _, head = await receive(channel, UpdateReply)
                await channel.receive_payload(head, len)  # a sink that keeps nothing
            ledger.book(channel.tally, "sender", request.purpose, request.block)
            seconds.append(time.perf_counter() - begun_s)
            cpu_s.append(time.process_time() - begun_cpu_s)
    assert ledger.total().bytes_in >= pulls * size_mb * MB
    return {"seconds": seconds, "cpu_s": cpu_s, "peak_mb": _peak_mb() - before_mb}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB


# --- the benchmark -------------------------------------------------------------------------------


def measure(quick: bool) -> tuple[harness.Figures, harness.Rows]:
    rows = [light_row(size_mb) for size_mb in ((1, 10) if quick else (1, 10, 100, 500))]
    figures = {f"light_{row['size_mb']}mb_mb_per_s": row["mb_per_s"] for row in rows}
    figures["light_receiver_peak_mb"] = max(row["receiver_peak_mb"] for row in rows)
    return figures, rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(Path(sys.argv[2])))
    elif sys.argv[1:2] == ["pull"]:
        import trio

        print(json.dumps(trio.run(pull, sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
    else:
        harness.main(NAME, measure)
