"""Gigabytes moved per nat of CE: 4 blocks, 6 workers as in the paper, several codecs and rounds.

Trains in one process (`benchmarks.exchange`): updates and what followers of other blocks' logs
fetch are counted to the byte, as payloads; frames, votes and records add what `benchmarks.node`
measures live. CE is the assembled model's, honest, on WikiText-2's valid split, composition fitted
on other bytes of it.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks import harness
from benchmarks.exchange import ExchangeRules, ExchangeSwarm
from node.data import benchmark_corpus
from node.windows import evaluation_windows
from swarm.composition import fit_composition
from swarm.evaluate import honest_ce
from swarm.run import Run
from swarm.runfile import scheduled_steps

SIX_WORKERS = (2, 2, 1, 1)
ONE_EACH = (1, 1, 1, 1)
TARGET_CE = 1.811  # the paper's three-host run ended here


@dataclass(frozen=True)
class Variant:
    """One way to exchange."""

    name: str
    codec: str
    steps_per_round: int
    rounds: int
    seed: int = 0
    replicas: tuple[int, ...] = SIX_WORKERS
    participation: float = 1.0
    late_rounds: int = 0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def variants(quick: bool) -> list[Variant]:
    rounds, steps = (4, 3) if quick else (200, 5)
    default = "topk:0.02:2:overall"
    rows = [
        Variant("default", default, steps, rounds),
        Variant("dense fp32", "fp32", steps, rounds),
        Variant("int8", "int8", steps, rounds),
        Variant("top-k 1 %", "topk:0.01:2:overall", steps, rounds),
        Variant("top-k 5 %", "topk:0.05:2:overall", steps, rounds),
        Variant("top-k 0.5 %", "topk:0.005:2:overall", steps, rounds),
        Variant("default, rounds of 10 steps", default, 2 * steps, rounds // 2),
        Variant("default, rounds of 20 steps", default, 4 * steps, rounds // 4),
    ]
    for seed in (0,) if quick else (0, 1, 2):
        rows.append(
            Variant(f"one worker a block, seed {seed}", default, steps, rounds, seed, ONE_EACH)
        )
        if seed:
            rows.append(Variant(f"default, seed {seed}", default, steps, rounds, seed))
    return rows


def measure(variant: Variant) -> dict[str, Any]:
    torch.set_num_threads(1)
    base = Run(seed=variant.seed)
    training = replace(base.training, steps_per_round=variant.steps_per_round, short_rounds=0)
    training = replace(training, steps=scheduled_steps(training, variant.rounds))
    run = replace(base, training=training)
    corpus = benchmark_corpus()
    rules = ExchangeRules(variant.codec, variant.participation, variant.late_rounds)
    swarm = ExchangeSwarm(run, list(variant.replicas), corpus.train, rules)
    held_out = _windows(corpus.valid, run.model.context, 65_536)
    fit = torch.cat(_windows(corpus.valid[-131_072:], run.model.context, 32_768))
    curve: list[tuple[int, int, float]] = []
    began = time.process_time()
    ce_start = honest_ce(swarm.assembled(), held_out).ce_nats
    for number in range(variant.rounds):
        swarm.one_round()
        if (number + 1) % max(1, variant.rounds // 20) == 0:
            ce = honest_ce(swarm.assembled(), held_out[:4]).ce_nats
            curve.append((swarm.update_bytes, swarm.relay_bytes, ce))
    model = fit_composition(swarm.assembled(), fit[:, :-1], fit[:, 1:])
    ce_end = honest_ce(model, held_out).ce_nats
    return {
        "codec": variant.codec,
        "steps_per_round": variant.steps_per_round,
        "rounds": variant.rounds,
        "workers": sum(variant.replicas),
        "seed": variant.seed,
        "ce_start": ce_start,
        "ce": ce_end,
        "update_bytes": swarm.update_bytes,
        "relay_bytes": swarm.relay_bytes,
        "gb_per_nat_updates": swarm.update_bytes / 1e9 / (ce_start - ce_end),
        "gb_per_nat": (swarm.update_bytes + swarm.relay_bytes) / 1e9 / (ce_start - ce_end),
        "bytes_seen_per_worker": run.training.steps * run.training.batch * run.model.context,
        "curve": curve,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def _windows(data: Any, context: int, limit_bytes: int) -> list[torch.Tensor]:
    windows = torch.from_numpy(evaluation_windows(data, context, limit_bytes).copy()).long()
    return list(windows.split(64))


def figures(rows: harness.Rows) -> harness.Figures:
    by_name = {row["name"]: row for row in rows}
    out: harness.Figures = {}
    if "default" in by_name:
        out |= {
            "ce_default": by_name["default"]["ce"],
            "gb_per_nat_default": by_name["default"]["gb_per_nat"],
        }
    if "dense fp32" in by_name and "default" in by_name:
        dense, default = by_name["dense fp32"], by_name["default"]
        out |= {
            "ce_dense": dense["ce"],
            "update_bytes_ratio": dense["update_bytes"] / default["update_bytes"],
            "bytes_ratio": (dense["update_bytes"] + dense["relay_bytes"])
            / (default["update_bytes"] + default["relay_bytes"]),
        }
    six = [r["ce"] for r in rows if r["name"] == "default" or r["name"].startswith("default, seed")]
    one = [r["ce"] for r in rows if r["name"].startswith("one worker a block")]
    if six and one:
        out |= {"ce_six_workers": statistics.fmean(six), "ce_one_per_block": statistics.fmean(one)}
        if len(six) > 1:
            out["ce_spread"] = max(six) - min(six)
    return out


def main() -> None:
    options = harness.parse("gb_per_nat")
    corpus = benchmark_corpus()
    facts = {
        "data": {"source": corpus.source, "sha256": corpus.sha256, "split": "valid"},
        "seeds": [0, 1, 2],
    }
    table = variants(options.quick)
    harness.measure_rows(options, "gb_per_nat", table, measure, figures, facts)


if __name__ == "__main__":
    main()
