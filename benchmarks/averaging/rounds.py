"""Timed rounds of both systems in turn, on the same vectors; nobody is late or dies."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.averaging.rows import DENSE, MB, row
from benchmarks.averaging.swarm import Peers, hold_to, peers, soon_s
from protocol.codec import DEFAULT_CODEC

SEED = 0
EIGHT_BIT = "uniform8"
OUR_CODECS = (DEFAULT_CODEC, DENSE)
THEIR_CODECS = ("fp16", EIGHT_BIT)
LINKS_MBIT = (None, 100)  # per peer
MATCH_TRIES = 5
LATER_S = 3.0  # after a round: what was put off until then
# In timed rounds nobody is late: the deadline is far away, and a round ends when all votes are in.
PATIENT = {
    "floor_s": 300.0,
    "ceiling_s": 300.0,
    "window_s": 60.0,
    "matchmaking_s": 5.0,
    "sender_timeout_s": 60.0,
}


# --- the vectors


def make_vectors(folder: Path, count: int, size: int) -> list[Path]:
    """Rows of 1000 with scales of their own; a common part and one of each peer, equally large."""
    common_rng = np.random.default_rng(SEED)
    scales = np.exp(0.5 * common_rng.standard_normal(size // 1000)).astype(np.float32)
    common = common_rng.standard_normal(size, dtype=np.float32)
    paths = []
    for index in range(count):
        own = np.random.default_rng((SEED, index)).standard_normal(size, dtype=np.float32)
        vector = ((common + own).reshape(-1, 1000) * scales[:, None] * np.float32(0.01)).ravel()
        paths.append(folder / f"{size}-{index}.npy")
        np.save(paths[-1], vector)
    return paths


def mean_of(paths: Sequence[Path], name: str) -> Path:
    total = np.zeros(np.load(paths[0], mmap_mode="r").shape, dtype=np.float64)
    for path in paths:
        total += np.load(path)
    mean = paths[0].with_name(f"{name}.npy")
    np.save(mean, (total / len(paths)).astype(np.float32))
    return mean


# --- rounds


async def warm_up(ours: Peers, codec: str, vectors: Sequence[Path]) -> None:
    """The first round, in which the replicas find each other."""
    await ours.load(codec, vectors)
    await ours.tell_all({"op": "collect", "codec": codec})
    await ours.tell_all({"op": "decide", "codec": codec})


async def cpu_later_s(system: Peers) -> float:
    """CPU seconds of all peers in the time after a round."""
    before_s = system.cpu_s()
    await asyncio.sleep(LATER_S)
    return system.cpu_s() - before_s


async def our_round(
    ours: Peers, codec: str, vectors: Sequence[Path], mean: Path, later: bool = False
) -> dict[str, Any]:
    await ours.load(codec, vectors)
    before = await ours.tell_all({"op": "counters", "codec": codec})
    cpu_s = ours.cpu_s()
    told = await ours.tell_all({"op": "go", "codec": codec, "at_s": soon_s()})
    cpu_s = ours.cpu_s() - cpu_s
    after = await ours.tell_all({"op": "counters", "codec": codec})
    later_s = {"cpu_later_s": await cpu_later_s(ours) / len(vectors)} if later else {}
    checks = await ours.tell_all({"op": "check", "codec": codec, "path": str(mean)})
    count = len(vectors)
    return {
        "seconds": max(t["seconds"] for t in told),
        "cpu_s": cpu_s / count,
        "bytes": (after[0]["lo_bytes"] - before[0]["lo_bytes"]) / count,
        "ledger": (ledger_of(after) - ledger_of(before)) / count,
        "error": max(c["error"] for c in checks),
        "included": min(c["included"] for c in checks),
        **later_s,
    }


def ledger_of(counters: list[dict[str, Any]]) -> int:
    return sum(int(counter["ledger_bytes"]) for counter in counters)


async def match(theirs: Peers, codec: str) -> list[dict[str, Any]]:
    """hivemind's search for a group, which now and then finds none: then once more."""
    for _ in range(MATCH_TRIES):
        matched = await theirs.tell_all({"op": "match", "codec": codec})
        if not any("failed" in m for m in matched):
            return matched
    raise RuntimeError(f"hivemind found no group in {MATCH_TRIES} tries")


async def their_round(
    theirs: Peers, codec: str, vectors: Sequence[Path], mean: Path, later: bool = False
) -> dict[str, Any]:
    await theirs.load(codec, vectors)
    matched = await match(theirs, codec)
    count = {"op": "counters", "codec": codec}
    before = await theirs.tell(0, count)
    cpu_s = theirs.cpu_s()
    told = await theirs.tell_all({"op": "go", "codec": codec, "at_s": soon_s()})
    cpu_s = theirs.cpu_s() - cpu_s
    after = await theirs.tell(0, count)
    later_s = {"cpu_later_s": await cpu_later_s(theirs) / len(vectors)} if later else {}
    checks = await theirs.tell_all({"op": "check", "codec": codec, "path": str(mean)})
    return {
        "seconds": max(t["seconds"] for t in told),
        "cpu_s": cpu_s / len(vectors),
        "matchmaking": max(m["seconds"] for m in matched),
        "bytes": (after["lo_bytes"] - before["lo_bytes"]) / len(vectors),
        "error": max(c["error"] for c in checks),
        "included": min(t.get("group", 0) for t in told),
        **later_s,
    }


async def measure(
    count: int,
    size_mb: int,
    repeats: int,
    our_codecs: Sequence[str],
    prefix: Sequence[str],
    links: Sequence[int | None] = LINKS_MBIT,
) -> harness.Rows:
    size = size_mb * MB // 4
    rows: harness.Rows = []
    with tempfile.TemporaryDirectory(prefix="bsavg") as text:
        folder = Path(text)
        vectors = make_vectors(folder, count, size)
        mean = mean_of(vectors, "mean")
        facts = {**PATIENT, "size": size}
        hold_to(prefix, None)
        async with (
            peers("ours", count, folder, prefix, {**facts, "codecs": our_codecs}) as ours,
            peers("hivemind", count, folder, prefix, {**facts, "codecs": THEIR_CODECS}) as theirs,
        ):
            for codec in our_codecs:
                await warm_up(ours, codec, vectors)
            for link in links:
                if not hold_to(prefix, None if link is None else link * count):
                    print("skipped: a slower link needs network namespaces and tc", flush=True)
                    continue
                done: dict[tuple[str, str], list[dict[str, Any]]] = {}
                last = repeats if link is None else min(repeats, 3)
                for number in range(last + 1):
                    later = number == last and link is None
                    for mine, other in turns(our_codecs)[: 2 if link is None else 1]:
                        first = await our_round(ours, mine, vectors, mean, later)
                        second = await their_round(theirs, other, vectors, mean, later)
                        if number:  # the first warms up
                            done.setdefault(("ours", mine), []).append(first)
                            done.setdefault(("hivemind", other), []).append(second)
                for (system, codec), found in done.items():
                    rows.append(row(system, codec, count, size_mb, link, found))
                    print(json.dumps(rows[-1]), flush=True)
    return rows


async def measure_apart(
    count: int, size_mb: int, repeats: int, prefix: Sequence[str]
) -> harness.Rows:
    """The default beside fp16 where the memory is too small for both at a time."""
    size = size_mb * MB // 4
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="bsavg") as text:
        folder = Path(text)
        vectors = make_vectors(folder, count, size)
        mean = mean_of(vectors, "mean")
        facts = {**PATIENT, "size": size}
        hold_to(prefix, None)
        mine, other = turns(OUR_CODECS[:1])[0]
        async with peers("ours", count, folder, prefix, {**facts, "codecs": [mine]}) as ours:
            await warm_up(ours, mine, vectors)
            rounds = [
                await our_round(ours, mine, vectors, mean, number == repeats)
                for number in range(repeats + 1)
            ]
            found["ours", mine] = rounds[1:]
        async with peers("hivemind", count, folder, prefix, {**facts, "codecs": [other]}) as theirs:
            rounds = [
                await their_round(theirs, other, vectors, mean, number == repeats)
                for number in range(repeats + 1)
            ]
            found["hivemind", other] = rounds[1:]
    rows = [row(*names, count, size_mb, None, rounds) for names, rounds in found.items()]
    for each in rows:
        print(json.dumps(each), flush=True)
    return rows


def turns(our_codecs: Sequence[str]) -> list[tuple[str, str]]:
    """Ours and theirs in turn: the default beside fp16, the dense one beside 8-bit."""
    pairs = [(DEFAULT_CODEC, "fp16"), (DENSE, EIGHT_BIT)]
    return [(ours if ours in our_codecs else DEFAULT_CODEC, theirs) for ours, theirs in pairs]
