"""What late and missing updates cost: CE at 100, 75 and 50 % participation, and 1 or 2 rounds late.

Three blocks of two replicas, trained in one process (`benchmarks.exchange`). An update that misses
its round is left out of it, as live: it stays in its sender's error feedback, and the next update
carries it (the rows of participation). The late rows are what the protocol avoids: an exchange that
lasts 1 or 2 rounds longer, so that every step is applied to a consensus that has moved on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import harness
from benchmarks.corpus import benchmark_corpus
from benchmarks.exchange import ExchangeRules, ExchangeSwarm
from benchmarks.exchange_rows import DEFAULT, HeldOut, SmallRow, cpu_minutes, train
from node.machine.memory import keep_freed_memory

REPLICAS = (2, 2, 2)


@dataclass(frozen=True, kw_only=True)
class Variant(SmallRow):
    """Which share of updates is in time, or how late all of them are."""

    participation: float = 1.0
    late_rounds: int = 0


def variants(quick: bool) -> list[Variant]:
    size = SmallRow.size(quick)
    return [
        Variant("all in time", **size),
        Variant("75 % participation", participation=0.75, **size),
        Variant("50 % participation", participation=0.5, **size),
        Variant("1 round late", late_rounds=1, **size),
        Variant("2 rounds late", late_rounds=2, **size),
    ]


def measure(variant: Variant) -> dict[str, Any]:
    keep_freed_memory()
    torch.set_num_threads(1)
    run = variant.run
    rules = ExchangeRules(DEFAULT, variant.participation, variant.late_rounds)
    swarm = ExchangeSwarm(run, REPLICAS, benchmark_corpus().train, rules)
    sizes = (4096, 2048, 2048) if variant.quick else (65_536, 16_384, 16_384)
    row = train(swarm, variant.rounds, HeldOut(run, *sizes))
    return {
        "participation": variant.participation,
        "late_rounds": variant.late_rounds,
        **row,
    }


def figures(rows: harness.Rows) -> harness.Figures:
    names = {
        "all in time": "ce_in_time",
        "75 % participation": "ce_75_percent",
        "50 % participation": "ce_50_percent",
        "1 round late": "ce_1_late",
        "2 rounds late": "ce_2_late",
    }
    return {names[row["name"]]: row["ce"] for row in rows if row["name"] in names}


def main() -> None:
    options = harness.parse("lateness")
    corpus = benchmark_corpus()
    facts = {
        "data": {"source": corpus.source, "sha256": corpus.sha256, "split": "valid"},
        "seeds": [0],
    }
    table = variants(options.quick)
    minutes = sum(cpu_minutes(v.run, REPLICAS) for v in table)
    print(f"{len(table)} rows, about {minutes / len(table):.1f} CPU min each, {minutes:.0f} in all")
    harness.measure_rows(options, "lateness", table, measure, figures, facts)


if __name__ == "__main__":
    main()
