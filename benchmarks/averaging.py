"""Averaging the same vectors among the same number of processes: ours beside hivemind's.

Real processes, each with its own p2pd, on loopback. Both systems are up at the same time and take
turns, so that a slow moment of the machine hits both (8 peers with 100 MB: one after the other, for
the memory); the first rounds of each are not counted.

    ours        node.replica: announce, pull, vote, judge, aggregate in integers, correct the
                weights. From the opening of the exchange until the last peer's weights follow.
                `speedup` and `bytes_ratio` are those of the codec that a swarm uses unless
                told otherwise, top-k with error feedback; those of int8, whose error after one
                round is as small as an 8-bit codec's can be, stand beside it as `..._int8`.
    hivemind    DecentralizedAverager. From the start of the all-reduce until the last peer's
                tensors are averaged. Its matchmaking (finding the group) comes before that: it
                stands in `matchmaking_s` and does not count in `seconds` nor in `speedup`. A round
                of its `step` has both, as ours has the announcements and votes that do the same:
                `speedup_round` is against their sum.

CPU per peer: of its process with all threads, its p2pd and whatever else it started, from the order
to begin until the last peer is done. Both systems have work that is not part of the step: ours puts
its record into the DHT and prepares for the next round up to 2.5 s later, hivemind's keeps its DHT
alive. It counts in no figure, but stands in the rows: `cpu_s_later_per_peer` is the CPU of the 3 s
after the last of the timed rounds, idling included.

Two links. Loopback as it is: no link at all, so the round takes as long as the CPU of all peers
together on this machine's cores. And, with 10 MB, loopback held to 100 Mbit/s per peer (in all, not
each), which is nearer to what hosts have at home.

Bytes per peer: what the loopback device of a network namespace of their own carried during a round,
with all headers, divided by the peers. The same for both; our own ledger's count stands beside it.
Error: relative L2 distance to the true mean of the vectors. Top-k sends the largest 2 % at once and
the rest later (error feedback), so its error after one round says how much of the mean is still to
come; with the dense codecs it is the codec's error.

Killed: one of four is killed (-9, with its p2pd) in the middle of a round, and the error is against
the mean of the survivors. Ours dies when half of its update is sent; hivemind's after half of the
time that its all-reduce usually takes.

Made to run unattended in under 25 minutes on 2 idle cores: 5 repeats at 10 MB, 3 at 100 MB, and 3
kills. Every group of rows is written when it is there. Started again at the same commit it goes on
with the groups that are missing; at another commit it measures all of them again, and what is there
of older code stays until its group is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.averaging_rows import DENSE, MB, figures_of, row
from benchmarks.averaging_swarm import (
    START_S,
    Peers,
    available_bytes,
    hold_to,
    namespace,
    peers,
    soon_s,
)
from protocol.codec import DEFAULT_CODEC

SEED = 0
EIGHT_BIT = "uniform8"
OUR_CODECS = (DEFAULT_CODEC, DENSE)
THEIR_CODECS = ("fp16", EIGHT_BIT)
LINKS_MBIT = (None, 100)  # per peer
MATCH_TRIES = 5
LATER_S = 3.0  # after a round: what was put off until then
NEEDED = 20  # bytes of memory for each byte that a peer averages: more than either system takes
# In timed rounds nobody is late: the deadline is far away, and a round ends when all votes are in.
PATIENT = {
    "floor_s": 300.0,
    "ceiling_s": 300.0,
    "window_s": 60.0,
    "matchmaking_s": 5.0,
    "sender_timeout_s": 60.0,
}
# With a dead peer the deadline decides: ours is the adaptive one, hivemind's its timeouts.
HASTY = {
    "floor_s": 1.0,
    "ceiling_s": 60.0,
    "window_s": 2.0,
    "matchmaking_s": 5.0,
    "sender_timeout_s": 3.0,
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


# --- a killed peer


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


# --- figures


# --- all of it, group by group


Measure = Callable[[Sequence[str]], Awaitable[harness.Rows]]


def groups(quick: bool) -> Iterator[tuple[str, Measure]]:
    """What is measured together, by its name."""
    for count in (4,) if quick else (2, 4, 8):
        for size_mb in (1,) if quick else (10, 100):
            yield f"{count} peers, {size_mb} MB", partial(measure_pair, count, size_mb, quick)
    for repeat in range(1 if quick else 3):
        size_mb, theirs = 1 if quick else 10, THEIR_CODECS[:1]
        yield f"killed {repeat}", partial(measure_killed, size_mb, repeat, theirs)


async def measure_pair(
    count: int, size_mb: int, quick: bool, prefix: Sequence[str]
) -> harness.Rows:
    repeats = 2 if quick else {10: 5, 100: 3}[size_mb]
    links = LINKS_MBIT if size_mb < 100 else LINKS_MBIT[:1]
    # Dense steps are kept as int64, 200 MB each: four peers do not fit into 16 GB.
    ours = OUR_CODECS if count * size_mb <= 200 else OUR_CODECS[:1]
    if count * size_mb * MB * NEEDED > available_bytes():
        print(f"skipped for its memory: {count} peers, {size_mb} MB", flush=True)
        return []
    if count * size_mb > 400:
        return await measure_apart(count, size_mb, repeats, prefix)
    return await measure(count, size_mb, repeats, ours, prefix, links)


def is_of(row: dict[str, Any], group: str, commit: str) -> bool:
    """A result that is being written makes the tree dirty: that does not count."""
    same = str(row.get("commit")).removesuffix("-dirty") == commit.removesuffix("-dirty")
    return row.get("group") == group and same


async def run(options: argparse.Namespace) -> None:
    commit = harness.commit()
    kept = {row["name"]: row for row in harness.rows_of(options.out)}
    with namespace() as prefix:
        for name, work in groups(options.quick):
            if options.only not in name:
                continue
            if any(
                (row.get("group"), row.get("commit")) == (name, commit) for row in kept.values()
            ):
                print(f"{name}: is there", flush=True)
                continue
            hold_to(prefix, None)
            found = [{**row, "group": name, "commit": commit} for row in await work(prefix)]
            if found:
                kept = {n: row for n, row in kept.items() if row.get("group") != name}
                kept |= {row["name"]: row for row in found}
                rows = list(kept.values())
                harness.write(options, "averaging", figures_of(rows), rows, {"seeds": [SEED]})


if __name__ == "__main__":
    asyncio.run(run(harness.parse("averaging")))
