"""What a further host is worth: replicas of a block beside one host alone, and beside a cluster.

All make the same number of steps:

- alone: one worker, at the best of three learning rates.
- a cluster of R: one worker with R times the batch, which is what R hosts could be at best; at the
  best of three learning rates, too.
- a swarm of R: R workers with the rounds, the codec and the learning rates of a preset; and the
  same with dense fp32.

    gain kept   (alone - swarm) / (alone - cluster)
    efficiency  bytes of text that a host alone needs for that CE, over the bytes that all R saw

Trains in one process (`benchmarks.exchange`): one independent block of the default model, or, where
the name says so, all four blocks (then with the composition fitted on other bytes). Rounds of
`small` and `large` are as long, and as dense, as those presets are planned for a run of so many
hours. CE is honest, on WikiText-2's valid split.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch

from benchmarks import harness
from benchmarks.corpus import benchmark_corpus
from benchmarks.exchange import ExchangeRules, ExchangeSwarm
from benchmarks.exchange_rows import HeldOut, cpu_minutes
from node.machine.memory import keep_freed_memory
from protocol.codec import CodecSpec
from swarm.consensus.schedule import CodecSchedule
from swarm.learning.composition import ComposedModel
from swarm.learning.evaluate import honest_ce
from swarm.learning.moving_copy import frozen_copy
from swarm.run import ModelShape, Run
from swarm.run_template import Wishes, preset
from swarm.runfile import RunFile

Kind = Literal["alone", "cluster", "swarm", "dense swarm"]
SIZES = (2, 4, 8)
RATES = {"alone": (0.5, 1.0, 2.0), "cluster": (1.0, 2.0, 4.0)}
LONGER = (2, 4, 8)  # a host alone, for so many times the bytes
SLOW = 0.1
SHORTER = {"small": 0.5, "large": 1.25}  # hours of 3000 steps; the presets' own would take days
CURVE_POINTS = 10


@dataclass(frozen=True)
class Row:
    """One way to train. `hosts`: replicas of every block, or the cluster's batches."""

    kind: Kind
    hosts: int
    _: KW_ONLY
    rate: float = 1.0  # on the preset's learning rate
    longer: int = 1
    blocks: int = 1
    slow: int = 0  # so many more hosts make a tenth of the steps
    seed: int = 0
    preset: str = "tiny"
    hours: float | None = None  # of the run that is planned; None: as the preset has it
    quick: bool = False

    @property
    def name(self) -> str:
        words = [self.kind if self.hosts == 1 else f"{self.kind} of {self.hosts}"]
        words += [f"and {self.slow} slow"] if self.slow else []
        words += [f"learning rate x {self.rate:g}"] if self.kind in RATES else []
        words += [f"{self.longer} times the bytes"] if self.longer > 1 else []
        words += [f"{self.blocks} blocks"] if self.blocks > 1 else []
        words += [f"rounds of {self.preset}"] if self.preset != "tiny" else []
        words += [f"seed {self.seed}"] if self.seed else []
        return ", ".join(words)

    @property
    def key(self) -> str:
        """What is measured, with the settings of the preset as they are now."""
        run, file = self.run, self.file
        settings = [
            run.training.learning_rate,
            run.training.replica_power,
            run.training.steps_per_round,
            run.training.steps,
        ]
        exchange = [file.exchange.codec, file.exchange.ends_density, file.rounds.count]
        return json.dumps([asdict(self), settings, exchange], sort_keys=True)

    @property
    def file(self) -> RunFile:
        return preset(self.preset, "worth", self.seed, Wishes(hours=self.hours))

    @property
    def replicas(self) -> tuple[int, ...]:
        return (self.hosts + self.slow if self.swarms else 1,) * self.blocks

    @property
    def swarms(self) -> bool:
        return self.kind in ("swarm", "dense swarm")

    @property
    def rounds(self) -> int:
        return (24 if self.quick else self.file.rounds.count) * self.longer

    @property
    def run(self) -> Run:
        base = self.file.run
        shape = replace(ModelShape(), blocks=self.blocks)
        if self.blocks == 1:
            shape = replace(shape, coupling="independent")
        if self.quick:
            shape = replace(shape, layers=1, width=32, context=64)
        training = replace(
            base.training,
            batch=base.training.batch * (self.hosts if self.kind == "cluster" else 1),
            learning_rate=base.training.learning_rate * self.rate,
            replica_power=base.training.replica_power if self.swarms else 0.0,
        )
        training = replace(training, steps=self.rounds * training.steps_per_round)
        return Run(shape, training=training, seed=self.seed)

    @property
    def rules(self) -> ExchangeRules:
        return ExchangeRules(self.codecs, same_text=self.file.data.same_text)

    @property
    def codecs(self) -> CodecSchedule:
        if self.kind == "dense swarm":
            return CodecSchedule.always("fp32")
        exchange = self.file.exchange
        return CodecSchedule(CodecSpec.parse(exchange.codec), self.rounds, exchange.ends_density)


def table(quick: bool) -> list[Row]:
    """Most wanted first: a cut-off session leaves the best part."""
    return list(_rows(quick))


def _rows(quick: bool) -> Iterator[Row]:
    for rate in RATES["alone"]:
        yield Row("alone", 1, rate=rate, quick=quick)
    for hosts in SIZES[:1] if quick else SIZES:
        yield Row("swarm", hosts, quick=quick)
        for rate in RATES["cluster"]:
            yield Row("cluster", hosts, rate=rate, quick=quick)
        yield Row("dense swarm", hosts, quick=quick)
    for longer in LONGER[:1] if quick else LONGER:
        for rate in RATES["alone"][:2]:
            yield Row("alone", 1, rate=rate, longer=longer, quick=quick)
    for hosts in (1,) if quick else (1, 2, 4):
        yield Row("swarm", hosts, slow=1, quick=quick)
    if not quick:
        for hosts in (1, 2, 4):
            yield Row("swarm", hosts, blocks=4)
        for name, hours in SHORTER.items():
            yield Row("swarm", 4, preset=name, hours=hours)
            for rate in RATES["alone"][1:]:
                yield Row("alone", 1, rate=rate, preset=name, hours=hours)
            for rate in RATES["cluster"]:
                yield Row("cluster", 4, rate=rate, preset=name, hours=hours)
            yield Row("dense swarm", 4, preset=name, hours=hours)


def measure(row: Row) -> dict[str, Any]:
    keep_freed_memory()
    torch.set_num_threads(1)
    run, began = row.run, time.process_time()
    swarm = ExchangeSwarm(run, row.replicas, benchmark_corpus().train, row.rules)
    for group in swarm.groups:
        for member in group.members[row.hosts :]:
            member.speed = SLOW
    sizes = (4096, 2048, 2048) if row.quick else (250_000, 16_384, 32_768)
    held_out = HeldOut(run, *sizes)
    curve: list[tuple[int, int, float]] = []  # bytes of text that a host saw, bytes moved, CE
    seen = run.training.steps_per_round * run.training.batch * run.model.context
    for number in range(1, row.rounds + 1):
        swarm.one_round()
        if number % max(1, row.rounds // CURVE_POINTS) == 0:
            ce = held_out.curve_ce(swarm)
            curve.append((number * seen, swarm.moved.everything, ce))
    swarm.settle()
    as_it_is = honest_ce(swarm.assembled(), held_out.end).ce_nats
    own, moved = own_ces(swarm, held_out.end), swarm.moved
    return {
        "ce": held_out.end_ce(swarm) if row.blocks > 1 else as_it_is,
        "ce_own": statistics.fmean(own),
        "everything_mb": moved.everything / 1e6,
        "learning_rate": run.training.learning_rate,
        "kind": row.kind,
        "hosts": row.hosts,
        "blocks": row.blocks,
        "slow": row.slow,
        "seed": row.seed,
        "preset": row.preset,
        "longer": row.longer,
        "steps": run.training.steps,
        "rounds": row.rounds,
        "steps_per_round": run.training.steps_per_round,
        "codec": str(row.codecs.base) if row.swarms else "",
        "ends_density": row.codecs.ends_density,
        "mean_density": row.codecs.mean(lambda codec: codec.density),
        "ce_not_fitted": as_it_is,  # as those of the replicas
        "update_mb": moved.update / 1e6,
        "bytes_seen": seen * row.rounds * (row.hosts if row.swarms else 1),
        "left_out": sum(member.left_out for group in swarm.groups for member in group.members),
        "curve": curve,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def own_ces(swarm: ExchangeSwarm, windows: Sequence[torch.Tensor]) -> list[float]:
    """CE of the replicas' own running weights; of the i-th replicas of all blocks together."""
    found = []
    for number in range(max(len(group.members) for group in swarm.groups)):
        members = [group.members[number % len(group.members)] for group in swarm.groups]
        blocks = [frozen_copy(member.worker.block) for member in members]
        found.append(honest_ce(ComposedModel(swarm.run, blocks), windows).ce_nats)
    return found


def figures(rows: harness.Rows) -> harness.Figures:
    plain = [row for row in rows if row["preset"] == "tiny" and row["seed"] == 0]
    one_block = [row for row in plain if row["blocks"] == 1 and not row["slow"]]
    alone = _best(one_block, "alone", 1)
    out: harness.Figures = {}
    if alone is None:
        return out
    out["ce_alone"] = alone["ce"]
    curve = _alone_curve(one_block)
    over, ratios, lags = [], [], []
    for hosts in SIZES:
        swarm, dense = _best(one_block, "swarm", hosts), _best(one_block, "dense swarm", hosts)
        cluster = _best(one_block, "cluster", hosts)
        if swarm is None:
            continue
        out[f"ce_swarm_{hosts}"] = swarm["ce"]
        over.append(swarm["ce"] - alone["ce"])
        lags.append(swarm["ce_not_fitted"] - swarm["ce_own"])
        if cluster is not None:
            out[f"ce_cluster_{hosts}"] = cluster["ce"]
            out[f"gain_kept_{hosts}"] = _gain(alone, swarm, cluster)
            _add_efficiency(out, f"efficiency_cluster_{hosts}", curve, cluster)
        if dense is not None:
            out[f"ce_dense_{hosts}"] = dense["ce"]
            ratios.append(dense["everything_mb"] / swarm["everything_mb"])
            if cluster is not None:
                out[f"gain_kept_dense_{hosts}"] = _gain(alone, dense, cluster)
        _add_efficiency(out, f"efficiency_{hosts}", curve, swarm)
    slowed = [
        row["ce"] - without["ce"]
        for row in plain
        if row["slow"] and (without := _without_slow(one_block, row))
    ]
    if slowed:
        out["worst_ce_of_a_slow_host"] = max(slowed)
    if over:
        out["worst_ce_over_alone"], out["consensus_lag_nats"] = max(over), max(lags)
    if ratios:
        out["bytes_ratio_dense"] = min(ratios)
    for row in plain:
        if row["blocks"] > 1 and row["kind"] == "swarm":
            out[f"ce_model_{row['hosts']}"] = row["ce"]
    return out


def _best(rows: harness.Rows, kind: Kind, hosts: int) -> dict[str, Any] | None:
    found = [r for r in rows if (r["kind"], r["hosts"], r["longer"]) == (kind, hosts, 1)]
    return min(found, key=lambda row: float(row["ce"]), default=None)


def _without_slow(rows: harness.Rows, row: dict[str, Any]) -> dict[str, Any] | None:
    """The same hosts and learning rate, without the slow ones."""
    kind: Kind = "alone" if row["hosts"] == 1 else "swarm"
    same = [r for r in rows if r["learning_rate"] == row["learning_rate"]]
    return _best(same, kind, row["hosts"])


def _gain(alone: dict[str, Any], swarm: dict[str, Any], cluster: dict[str, Any]) -> float:
    return float((alone["ce"] - swarm["ce"]) / (alone["ce"] - cluster["ce"]))


def _alone_curve(rows: harness.Rows) -> list[tuple[float, float]]:
    """Bytes and CE of a host alone, each at the best of the learning rates that were tried."""
    best: dict[int, float] = {}
    for row in rows:
        if row["kind"] == "alone":
            best[row["bytes_seen"]] = min(row["ce"], best.get(row["bytes_seen"], math.inf))
    return sorted(best.items())


def _add_efficiency(
    out: harness.Figures, name: str, curve: Sequence[tuple[float, float]], row: dict[str, Any]
) -> None:
    needed = bytes_needed(curve, row["ce"])
    if needed is not None:
        out[name] = needed / row["bytes_seen"]


def bytes_needed(curve: Sequence[tuple[float, float]], ce: float) -> float | None:
    """What a host alone has to see for a CE, between two that were measured: in the logarithm of
    the bytes CE is nearly a line. None beyond what was measured."""
    for (few, worse), (many, better) in pairwise(curve):
        if better <= ce <= worse:
            share = (worse - ce) / (worse - better)
            return float(few * (many / few) ** share)
    return None


def main() -> None:
    options = harness.parse("worth")
    corpus = benchmark_corpus()
    facts = {
        "data": {"source": corpus.source, "sha256": corpus.sha256, "split": "valid"},
        "seeds": [0],
    }
    rows = table(options.quick)
    minutes = sum(cpu_minutes(row.run, row.replicas) for row in rows)
    print(f"{len(rows)} rows, about {minutes:.0f} CPU minutes in all")
    harness.measure_rows(options, "worth", rows, measure, figures, facts)


if __name__ == "__main__":
    main()
