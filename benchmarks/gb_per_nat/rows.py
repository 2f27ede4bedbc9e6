"""Gigabytes moved per nat of CE: 4 blocks, 6 workers as in the paper, several codecs and rounds.

Trains in one process (`benchmarks.exchange`), with the rounds and the learning rates of the preset
`tiny`. Bytes are those of all hosts, as their ledgers would book them: `update` (replicas of a
block), `relay` (workers that follow the logs of other blocks), and an estimate for votes and
records. CE is the assembled model's, honest, on WikiText-2's valid split, composition fitted on
other bytes of it. All rows see the same bytes per worker.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

import torch

from benchmarks import harness
from benchmarks.corpus import benchmark_corpus
from benchmarks.exchange import ExchangeRules, ExchangeSwarm
from benchmarks.exchange_rows import HeldOut, cpu_minutes
from node.machine.memory import keep_freed_memory
from protocol.codec import CodecSpec
from swarm.consensus.schedule import CodecSchedule
from swarm.run import ModelShape, Run
from swarm.run_template import preset
from swarm.runfile import RunFile

SIX_WORKERS = (2, 2, 1, 1)
ONE_EACH = (1, 1, 1, 1)
TARGET_CE = 1.811  # the paper's three-host run ended here
CURVE_POINTS = 12
QUICK_ROUNDS = 8


@dataclass(frozen=True)
class Variant:
    """One way to exchange. What is None is as the preset has it."""

    name: str
    _: KW_ONLY
    codec: str | None = None
    ends_density: float | None = None
    longer: int = 1  # so many times the steps in a round, for as many rounds fewer
    seed: int = 0
    replicas: tuple[int, ...] = SIX_WORKERS
    quick: bool = False

    @property
    def key(self) -> str:
        exchange = [str(self.codecs.base), self.codecs.ends_density]
        training = {**asdict(self.run.training), "short_rounds": 0}  # once a field: rows keep it
        settings = [training, exchange, self.rounds]
        return json.dumps([asdict(self), settings], sort_keys=True)

    @property
    def file(self) -> RunFile:
        return preset("tiny", "gb-per-nat", self.seed)

    @property
    def rounds(self) -> int:
        return (QUICK_ROUNDS if self.quick else self.file.rounds.count) // self.longer

    @property
    def run(self) -> Run:
        run = self.file.run
        shape = ModelShape(layers=1, width=32, context=64) if self.quick else run.model
        steps = self.longer * run.training.steps_per_round
        training = replace(run.training, steps_per_round=steps, steps=self.rounds * steps)
        return replace(run, model=shape, training=training)

    @property
    def codecs(self) -> CodecSchedule:
        exchange = self.file.exchange
        ends = exchange.ends_density if self.ends_density is None else self.ends_density
        return CodecSchedule(CodecSpec.parse(self.codec or exchange.codec), self.rounds, ends)

    @property
    def rules(self) -> ExchangeRules:
        return ExchangeRules(self.codecs, same_text=self.file.data.same_text)


def variants(quick: bool) -> list[Variant]:
    """Most wanted first: a cut-off session leaves the best part."""
    return list(_variants(quick))


def _variants(quick: bool) -> Iterator[Variant]:
    yield Variant("default", quick=quick)
    yield Variant("one worker a block", replicas=ONE_EACH, quick=quick)
    for seed in () if quick else (1, 2):
        yield Variant(f"default, seed {seed}", seed=seed)
        yield Variant(f"one worker a block, seed {seed}", seed=seed, replicas=ONE_EACH)
    yield Variant("dense fp32", codec="fp32", ends_density=0.0, quick=quick)
    yield Variant("top-k 5 %", codec="topk:0.05:2:overall", quick=quick)
    yield Variant("rounds twice as long", longer=2, quick=quick)
    yield Variant("top-k 2 %", codec="topk:0.02:2:overall", quick=quick)
    yield Variant("the ends no denser", ends_density=0.0, quick=quick)
    yield Variant("int8", codec="int8", ends_density=0.0, quick=quick)
    yield Variant("rounds 4 times as long", longer=4, quick=quick)


def measure(variant: Variant) -> dict[str, Any]:
    keep_freed_memory()
    torch.set_num_threads(1)
    run = variant.run
    corpus = benchmark_corpus()
    swarm = ExchangeSwarm(run, variant.replicas, corpus.train, variant.rules)
    sizes = (4096, 2048, 2048) if variant.quick else (250_000, 16_384, 32_768)
    held_out = HeldOut(run, *sizes)
    began = time.process_time()
    ce_start = held_out.curve_ce(swarm)
    curve: list[tuple[int, int, float]] = [(0, 0, ce_start)]  # update bytes, all bytes, CE
    for number in range(variant.rounds):
        swarm.one_round()
        if (number + 1) % max(1, variant.rounds // CURVE_POINTS) == 0:
            ce = held_out.curve_ce(swarm)
            curve.append((swarm.moved.update, swarm.moved.everything, ce))
    swarm.settle()
    ce_end = held_out.end_ce(swarm)
    moved, gained = swarm.moved, ce_start - ce_end
    return {
        "codec": str(variant.codecs.base),
        "ends_density": variant.codecs.ends_density,
        "steps_per_round": run.training.steps_per_round,
        "rounds": variant.rounds,
        "workers": sum(variant.replicas),
        "seed": variant.seed,
        "ce": ce_end,
        "update_mb": moved.update / 1e6,
        "everything_mb": moved.everything / 1e6,
        "gb_per_nat_updates": moved.update / 1e9 / gained,
        "gb_per_nat": moved.everything / 1e9 / gained,
        "relay_mb": moved.relay / 1e6,
        "control_mb_estimate": moved.control / 1e6,
        "ce_start": ce_start,
        "bytes_seen_per_worker": run.training.steps * run.training.batch * run.model.context,
        "curve": curve,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def pareto(rows: harness.Rows) -> list[str]:
    """Names of the rows of six workers and seed 0 that no other one beats in bytes and CE."""
    found = [r for r in rows if r["workers"] == sum(SIX_WORKERS) and r["seed"] == 0]
    return [
        row["name"]
        for row in found
        if not any(
            other["everything_mb"] <= row["everything_mb"]
            and other["ce"] <= row["ce"]
            and other is not row
            for other in found
        )
    ]


def figures(rows: harness.Rows) -> harness.Figures:
    by_name = {row["name"]: row for row in rows}
    out: harness.Figures = {}
    default = by_name.get("default")
    if default:
        out |= {
            "ce_default": default["ce"],
            "gb_per_nat_default": default["gb_per_nat"],
            "gb_per_nat_default_updates": default["gb_per_nat_updates"],
        }
    if default and (dense := by_name.get("dense fp32")):
        out |= {
            "ce_dense": dense["ce"],
            "gb_per_nat_dense": dense["gb_per_nat"],
            "update_bytes_ratio": dense["update_mb"] / default["update_mb"],
            "everything_bytes_ratio": dense["everything_mb"] / default["everything_mb"],
        }
    if default and (int8 := by_name.get("int8")):
        out |= {
            "ce_int8": int8["ce"],
            "update_bytes_ratio_int8": int8["update_mb"] / default["update_mb"],
        }
    six = {r["seed"]: r["ce"] for r in rows if r["name"].split(",")[0] == "default"}
    one = {r["seed"]: r["ce"] for r in rows if r["name"].startswith("one worker a block")}
    both = sorted(six.keys() & one.keys())
    if both:
        out |= {
            "ce_six_workers": statistics.fmean(six[seed] for seed in both),
            "ce_one_per_block": statistics.fmean(one[seed] for seed in both),
            "ce_pairs": len(both),
        }
    if len(both) > 1:
        out["ce_spread"] = max(max(ces.values()) - min(ces.values()) for ces in (six, one))
    return out


def main() -> None:
    options = harness.parse("gb_per_nat")
    corpus = benchmark_corpus()
    facts = {
        "data": {"source": corpus.source, "sha256": corpus.sha256, "split": "valid"},
        "seeds": [0, 1, 2],
        "target_ce": TARGET_CE,
    }
    table = variants(options.quick)
    for variant in table:
        print(f"{variant.name}: about {cpu_minutes(variant.run, variant.replicas):.1f} CPU min")
    harness.measure_rows(options, "gb_per_nat", table, measure, figures, facts)


if __name__ == "__main__":
    main()
