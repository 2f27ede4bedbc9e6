"""A round in which one of four peers is killed, and how far from the mean the others end."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.averaging.rounds import make_vectors, match, mean_of, our_round, warm_up
from benchmarks.averaging.rows import DENSE, MB
from benchmarks.averaging.swarm import START_S, Peers, peers, soon_s

# With a dead peer the deadline decides: ours is the adaptive one, hivemind's its timeouts.
HASTY = {
    "floor_s": 1.0,
    "ceiling_s": 60.0,
    "window_s": 2.0,
    "matchmaking_s": 5.0,
    "sender_timeout_s": 3.0,
}


async def measure_killed(
    size_mb: int, repeat: int, their_codecs: Sequence[str], prefix: Sequence[str]
) -> harness.Rows:
    count, size, victim = 4, size_mb * MB // 4, 3
    survivors = range(victim)
    with tempfile.TemporaryDirectory(prefix="bsavg") as text:
        folder = Path(text)
        vectors = make_vectors(folder, count, size)
        everybody = mean_of(vectors, "mean")
        wanted = mean_of(vectors[:victim], "survivors")
        facts = {**HASTY, "size": size}
        rows = []
        async with peers("ours", count, folder, prefix, {**facts, "codecs": [DENSE]}) as ours:
            await warm_up(ours, DENSE, vectors)
            usual = [await our_round(ours, DENSE, vectors, everybody) for _ in range(4)]
            await ours.load(DENSE, vectors)
            order = {"op": "go", "codec": DENSE, "at_s": soon_s()}
            dying = asyncio.create_task(ours.tell(victim, {**order, "dies": True}))
            told = await ours.tell_all(order, survivors)
            await asyncio.gather(dying, return_exceptions=True)
            found = await errors_of(ours, DENSE, survivors, wanted, everybody)
            rows.append(killed_row("ours", DENSE, size_mb, repeat, told, found, usual))
        for codec in their_codecs:
            async with peers(
                "hivemind", count, folder, prefix, {**facts, "codecs": [codec]}
            ) as theirs:
                usual = []
                for _ in range(2):
                    await theirs.load(codec, vectors)
                    await match(theirs, codec)
                    order = {"op": "go", "codec": codec, "at_s": soon_s()}
                    told = await theirs.tell_all(order)
                    usual.append({"seconds": max(t["seconds"] for t in told)})
                await theirs.load(codec, vectors)
                await match(theirs, codec)
                at_s = soon_s()
                order = {"op": "go", "codec": codec, "at_s": at_s}
                dying = asyncio.create_task(theirs.tell(victim, order))
                telling = asyncio.create_task(theirs.tell_all(order, survivors))
                await asyncio.sleep(at_s - soon_s() + START_S + usual[-1]["seconds"] / 2)
                theirs.kill(victim)
                told = await telling
                await asyncio.gather(dying, return_exceptions=True)
                found = await errors_of(theirs, codec, survivors, wanted, everybody)
                rows.append(killed_row("hivemind", codec, size_mb, repeat, told, found, usual))
    for each in rows:
        print(json.dumps(each), flush=True)
    return rows


async def errors_of(
    system: Peers, codec: str, survivors: Sequence[int], *means: Path
) -> list[list[float]]:
    """The survivors' errors against each of these means."""
    found = []
    for path in means:
        check = {"op": "check", "codec": codec, "path": str(path)}
        found.append([answer["error"] for answer in await system.tell_all(check, survivors)])
    return found


def killed_row(
    system: str,
    codec: str,
    size_mb: int,
    repeat: int,
    told: list[dict[str, Any]],
    found: list[list[float]],
    usual: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "name": f"killed: {system} {codec}, {size_mb} MB, {repeat}",
        "killed": system,
        "codec": codec,
        "size_mb": size_mb,
        "error": max(found[0]),
        "error_to_mean_of_all": max(found[1]),  # small if the dead one's vector was counted whole
        "seconds": round(max(t["seconds"] for t in told), 3),
        "usual_seconds": round(statistics.median(u["seconds"] for u in usual), 3),
        "reported_failure": sum("failed" in t for t in told),
        "errors": found[0],
    }
