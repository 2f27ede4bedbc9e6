"""Frames, digests and the ledger on a p2pd stream, against the same stream with nothing on it.

Two processes, each with its p2pd, on loopback. Three ways to move the same bytes take turns within
each round, so that a slow moment of a shared machine hits all of them. A way's speed is its best
round; a ratio is the median of the rounds' ratios, in the figures of those of 100 MB and more.

    framed      a request and its answer as nodes exchange them: frames, digests, limits, ledger
    bare        the same stream object, raw bytes
    hivemind    hivemind's own binary stream (asyncio's StreamReader and StreamWriter), raw bytes

Peak memory is what the kernel says a process held at most during a transfer, above what it held
when it had just started. The ledger is compared with the kernel's interface counters across two
network namespaces after the documented overhead (`benchmarks.link_model`); that needs root and is
skipped else.
"""

from __future__ import annotations

from statistics import median

from benchmarks import harness
from benchmarks.transport.ledger import measure_ledger
from benchmarks.transport.light import light_row
from benchmarks.transport.p2pd import measure, run_loop


def run(quick: bool) -> tuple[harness.Figures, harness.Rows]:
    sizes = [1, 10, 100] if quick else [1, 10, 100, 500]
    rounds = {1: 15, 10: 9, 100: 5} if quick else {1: 45, 10: 24, 100: 15, 500: 6}
    rows = run_loop(measure(sizes, rounds))
    large = [row for row in rows if row["size_mb"] >= 100]
    figures = {
        # Of neighbours in time, then the middle one: a busy moment spoils a pair, not the figure.
        **{
            name: median(value for row in large for value in row[f"{name}_rounds"])
            for name in ("framed_vs_bare", "framed_vs_hivemind")
        },
        "framed_mb_per_s": max(row["framed_mb_per_s"] for row in large),
        "receiver_peak_mb": max(row["receiver_peak_mb"] for row in rows),
        "sender_peak_mb": max(row["sender_peak_mb"] for row in rows),
    }
    ledger = run_loop(measure_ledger([10, 10] if quick else [10, 50, 100]))
    if ledger is not None:
        rows.append(ledger)
        figures["ledger_error_percent"] = ledger["error_percent"]
    rows += [light_row(size, 2) for size in sizes[1:3]]  # py-libp2p beside it
    return figures, rows


if __name__ == "__main__":
    harness.main("transport", run)
