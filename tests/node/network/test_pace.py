"""Rates: bytes over time as allowed, in both directions, and small messages that do not wait."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from node.simulator.virtual_time import run_virtually
from tests.support.loopback import RUN_ID, _no_daemon_left, daemon_settings, node, run  # noqa: F401

# isort: split
from node.network.network import Network, NetworkSettings
from node.network.pace import BURST_S, DEBT_S, PIECE_BYTES, SMALL_BYTES, PacedStream, Rate
from node.network.service import Reply, Status
from protocol import messages
from protocol.frames import Stalled
from protocol.records import Role

RATE = 100_000.0


class Wire:
    """A stream without limits: what was written when, and as much to read as one wants."""

    def __init__(self) -> None:
        self.written: list[tuple[float, int]] = []

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        await asyncio.sleep(0)  # others have a turn, as on a network
        return bytes(max_bytes)

    async def write(self, data: Any, timeout_s: float) -> None:
        self.written.append((asyncio.get_running_loop().time(), len(data)))

    async def close(self) -> None: ...

    def abort(self) -> None: ...


def rate() -> Rate:
    return Rate(RATE, asyncio.get_running_loop().time)


def test_bulk_is_sent_at_the_rate_and_a_small_message_passes_it() -> None:
    async def main() -> None:
        loop, wire, up = asyncio.get_running_loop(), Wire(), rate()
        began_s = loop.time()
        streams = [PacedStream(wire, up, None) for _ in range(3)]
        bulk = asyncio.gather(*(s.write(bytes(200_000), 10.0) for s in streams))
        await asyncio.sleep(1.0)  # of virtual time: in the middle of it
        asked_s = loop.time()
        await PacedStream(wire, up, None).write(b"a vote" * 100, 1.0)
        assert loop.time() == asked_s
        await bulk
        spent_s = loop.time() - began_s
        assert 600_000 / RATE - BURST_S - 0.6 <= spent_s <= 600_000 / RATE + 0.1
        # In every second: no more than the rate, one piece of each stream and the burst.
        times = wire.written
        for start_s, _ in times:
            moved = sum(size for at_s, size in times if start_s <= at_s < start_s + 1.0)
            assert moved <= RATE * (1.0 + BURST_S) + 4 * PIECE_BYTES
        assert all(size <= PIECE_BYTES for _, size in times)

    run_virtually(main())


def test_reading_keeps_to_the_rate_but_for_short_answers() -> None:
    async def main() -> None:
        loop, down = asyncio.get_running_loop(), rate()
        stream = PacedStream(Wire(), None, down)
        began_s, received = loop.time(), 0
        while received < 500_000:
            received += len(await stream.read(256_000, 10.0))
        assert 500_000 / RATE - BURST_S - 0.4 <= loop.time() - began_s <= 500_000 / RATE + 0.1
        # A new question: its short answer does not wait for what the bulk still owes.
        other = PacedStream(Wire(), None, down)
        asked_s = loop.time()
        await other.write(b"question", 1.0)
        assert len(await other.read(SMALL_BYTES, 1.0)) == SMALL_BYTES
        assert loop.time() == asked_s

    run_virtually(main())


def test_what_cannot_be_in_time_is_said_at_once() -> None:
    async def main() -> None:
        up = rate()
        up.moved(int(20 * RATE))
        with pytest.raises(Stalled, match="rate"):
            await PacedStream(Wire(), up, None).write(bytes(100_000), 5.0)

    run_virtually(main())


@pytest.mark.parametrize("direction", ["up", "down"])
def test_small_messages_leave_bulk_a_debt_of_seconds_at_most(direction: str) -> None:
    """They never wait. A minute of them left bulk without a turn for seven."""

    async def main() -> None:
        loop, limit = asyncio.get_running_loop(), rate()
        up, down = (limit, None) if direction == "up" else (None, limit)
        for _ in range(600):  # eight times what is allowed
            stream = PacedStream(Wire(), up, down)
            await stream.write(bytes(8_000), 1.0)
            assert len(await stream.read(8_000, 1.0)) == 8_000
            await asyncio.sleep(0.01)
        assert limit.wait_s() <= DEBT_S
        began_s = loop.time()
        bulk = PacedStream(Wire(), up, down)
        await bulk.write(bytes(100_000), 10.0)
        for _ in range(7):
            await bulk.read(PIECE_BYTES, 10.0)
        assert loop.time() - began_s <= DEBT_S + 100_000 / RATE + 0.5

    run_virtually(main())


def test_bulk_of_many_streams_still_keeps_to_the_rate() -> None:
    """The bound on the debt is for what does not wait: bulk must not profit from it."""

    async def main() -> None:
        loop, up = asyncio.get_running_loop(), Rate(0.0, asyncio.get_running_loop().time)
        began_s = loop.time()
        streams = [PacedStream(Wire(), up, None) for _ in range(8)]
        await asyncio.gather(*(s.write(bytes(10 * PIECE_BYTES), 60.0) for s in streams))
        assert loop.time() - began_s >= 0.7 * 80 * PIECE_BYTES / up.bytes_per_s

    run_virtually(main())


@pytest.mark.parametrize("direction", ["up", "down"])
def test_two_real_nodes_measured_bytes_over_time(tmp_path: Path, direction: str) -> None:
    """A limit on one side of a transfer; questions in between are answered at once."""
    size_bytes, allowed = 6 << 20, 2 << 20
    payload = bytes(size_bytes)

    async def main() -> None:
        async with node(tmp_path, "donor") as donor:
            limits = {f"{direction}_bytes_per_s": float(allowed)}
            settings = NetworkSettings(
                daemon_settings(tmp_path, "paced"), RUN_ID, b"", tuple(await donor.invitations())
            )
            paced_settings = dataclasses.replace(settings, **limits)
            status = lambda: Status(Role.REPLICA, 0)  # noqa: E731
            async with Network(paced_settings, status) as paced:
                asked, asker = (paced, donor) if direction == "up" else (donor, paced)

                async def shard(request: messages.ShardRequest, _: bytes) -> Reply:
                    return Reply(messages.ShardReply(shard=0), payload)

                asked.serve(messages.ShardRequest, shard, bulk=True)
                request = messages.ShardRequest(run=RUN_ID, block=0, digest=bytes(32), shard=0)
                began_s = time.monotonic()
                bulk = asyncio.create_task(
                    asker.request(asked.peer_id, request, messages.ShardReply, deadline_s=60.0)
                )
                pings = 0
                while not bulk.done():
                    await asker.request(asked.peer_id, messages.Ping(), messages.Pong)
                    pings += 1
                answer = await bulk
                spent_s = time.monotonic() - began_s
                assert len(answer.payload) == size_bytes
                assert spent_s >= (size_bytes / allowed - BURST_S) * 0.9
                assert pings >= 5  # none of them waited for the bulk
                counted = paced.ledger.total()
                moved = counted.bytes_out if direction == "up" else counted.bytes_in
                assert moved >= size_bytes

    run(main(), 120.0)
