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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.averaging.killed import measure_killed
from benchmarks.averaging.rounds import (
    LINKS_MBIT,
    OUR_CODECS,
    SEED,
    THEIR_CODECS,
    measure,
    measure_apart,
)
from benchmarks.averaging.rows import MB, figures_of
from benchmarks.averaging.swarm import available_bytes, hold_to, namespace

NEEDED = 20  # bytes of memory for each byte that a peer averages: more than either system takes
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
