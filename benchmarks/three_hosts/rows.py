"""Rows of the public-network experiments: which there are, what is said of one, their figures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import harness
from benchmarks.corpus import benchmark_corpus
from benchmarks.three_hosts.swarm import (
    DENSE,
    SPARSE,
    Outcome,
    Plan,
    experiment,
    explained,
    run_file,
    start_ce,
    topology_text,
)
from benchmarks.wan import events as log
from protocol.errors import BlockswarmError
from swarm.run import ModelShape, Training

NAT, SLOW = ("nat1", "nat2"), "slow"
SIX, TEN = 6, 10
QUICK_ROUNDS = 5


@dataclass(frozen=True)
class Variant:
    """A row. What it takes is printed before it starts."""

    name: str
    topology: str
    codec: str
    rounds: int
    steps: int
    period_s: float
    shape: ModelShape
    evaluate_bytes: int
    slow: bool = True
    quick: bool = False  # one worker a host

    @property
    def key(self) -> str:
        return json.dumps({**asdict(self), "optimizer": Training().optimizer}, sort_keys=True)

    @property
    def plan(self) -> Plan:
        run = run_file(
            "three hosts", self.shape, self.codec, self.rounds, self.steps, self.period_s
        )
        text = topology_text(self.topology, self.slow)
        text = text.replace("workers = 2", "workers = 1") if self.quick else text
        return Plan(text, run, self.evaluate_bytes, QUICK_ROUNDS if self.quick else 0)

    @property
    def workers(self) -> int:
        return TEN if self.topology == "ten.toml" else SIX // (2 if self.quick else 1)


def variants(quick: bool) -> list[Variant]:
    """The most wanted first. Sized for two cores: see `Plan.load`."""
    if quick:
        tiny = ModelShape(blocks=1, layers=1, width=64, heads=2, context=64)
        return [
            Variant(name, "three_hosts.toml", codec, 200, 20, 6.0, tiny, 8192, quick=True)
            for name, codec in (("sparse", SPARSE), ("dense", DENSE))
        ]
    shape = ModelShape(blocks=3, layers=2, width=128, heads=4, context=128)
    small = ModelShape(blocks=2, layers=1, width=96, heads=4, context=96)
    three, ten = "three_hosts.toml", "ten.toml"
    return [
        Variant("sparse", three, SPARSE, 66, 10, 10.0, shape, 250_000),
        Variant("dense", three, DENSE, 66, 10, 10.0, shape, 250_000),
        Variant("full participation", three, SPARSE, 44, 15, 15.0, shape, 250_000),
        Variant("ten", ten, SPARSE, 40, 24, 10.0, small, 100_000),
        Variant("ten, none slow", ten, SPARSE, 40, 24, 10.0, small, 100_000, slow=False),
    ]


def measure(variant: Variant) -> dict[str, Any]:
    plan = variant.plan
    late = (SLOW,) if variant.topology == "ten.toml" and variant.slow else ()
    try:
        outcome = experiment(plan, late)
    except BlockswarmError as error:
        raise explained(error) from None
    ce_start = start_ce(plan.run, benchmark_corpus(), variant.evaluate_bytes)
    ce_end = float(outcome.assembled["ce_nats"])
    gained = ce_start - ce_end
    moved, swarm = outcome.figures, plan.run.run
    first = log.common_first({k: v for k, v in outcome.logs.items() if k.split()[0] not in late})
    return {
        "codec": variant.codec,
        "workers": variant.workers,
        "rounds": variant.rounds,
        "ce_start": ce_start,
        "ce_end": ce_end,
        "gb_moved": moved["gb_kernel"],
        "gb_per_nat": moved["gb_kernel"] / gained if gained > 0 else -1.0,
        "included_percent": 100 * log.included_share(outcome.logs, first),
        "gb_ledger": moved["gb_ledger"],
        "gb_dht_estimate": moved["gb_dht_estimate"],
        "gb_before_assembly": outcome.kernel_before_assembly / 2e9,
        "gb_expected": moved["gb_expected"],
        "ledger_error_percent": 100 * abs(moved["gb_expected"] / moved["gb_kernel"] - 1),
        "shape": f"{swarm.model.blocks}x{swarm.model.layers}, width {swarm.model.width}",
        "steps_per_round": variant.steps,
        "period_s": variant.period_s,
        "bytes_seen_per_worker": swarm.training.steps * swarm.training.batch * swarm.model.context,
        "steps_made": _steps(outcome),
        "first_common_round": first,
        "tcp_resent_percent": moved["tcp_resent_percent"],
        "bytes_by_purpose": log.bytes_by_purpose(outcome.logs),
        "curve": log.curve(outcome.logs),
        "members": outcome.rows,
        **(_strangers(outcome, variant) if variant.workers == TEN else {}),
    }


def _steps(outcome: Outcome) -> dict[str, int]:
    return {
        name: sum(e["steps"] for e in log.rounds(events)) for name, events in outcome.logs.items()
    }


def _strangers(outcome: Outcome, variant: Variant) -> dict[str, Any]:
    """What the odd ones of ten hosts contribute, and what the slow one costs those of its block."""
    logs = outcome.logs
    slow = log.rounds(logs[f"{SLOW} 0"])
    nat = {name: logs[f"{name} 0"] for name in NAT}
    block = slow[-1]["block"] if slow else -1
    others = log.of_block(logs, block, without=(f"{SLOW} 0",))
    # From where on the slow host was there, it can delay the others.
    first = max(slow[0]["round"] if slow else 0, log.common_first(others))
    return {
        "nat_included": log.included_share(nat),
        "lossy_included": log.included_share({"lossy": logs["lossy 0"]}),
        "slow_included": log.included_share({SLOW: logs[f"{SLOW} 0"]}),
        "slow_rounds": len(slow),
        "others_round_s": log.seconds_per_decision(others, first),
        "others_deadline_s": log.deadline_s(others, first),
    }


def figures(rows: harness.Rows) -> harness.Figures:
    by_name = {row["name"]: row for row in rows}
    out: harness.Figures = {}
    sparse, dense = by_name.get("sparse"), by_name.get("dense")
    if sparse:
        wanted = "ce_start ce_end gb_moved gb_per_nat ledger_error_percent included_percent"
        out |= {name: sparse[name] for name in wanted.split()}
    if full := by_name.get("full participation"):
        wanted = "ce_end gb_moved gb_per_nat included_percent"
        out |= {f"{name}_full": full[name] for name in wanted.split()}
    if dense:
        wanted = "ce_end gb_moved gb_per_nat ledger_error_percent included_percent"
        out |= {f"{name}_dense": dense[name] for name in wanted.split()}
    if sparse and dense and sparse["gb_per_nat"] > 0:
        out["dense_ratio"] = dense["gb_per_nat"] / sparse["gb_per_nat"]
    if ten := by_name.get("ten"):
        out |= {"nat_included": ten["nat_included"], "ce_end_ten": ten["ce_end"]}
    even = by_name.get("ten, none slow")
    if ten and even and ten["slow_rounds"] and even["others_round_s"]:
        longer = ten["others_round_s"] - even["others_round_s"]
        wait = ten["others_deadline_s"] - even["others_deadline_s"]
        out["slow_host_delay_percent"] = 100 * longer / even["others_round_s"]
        out["slow_host_wait_percent"] = 100 * wait / even["others_round_s"]
    return out
