"""The rows of the quality benchmark, most wanted first, and the figures that they give."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks import harness
from benchmarks.quality.row import EVALUATION_BYTES, Variant
from swarm.run import ModelShape, Noise, Run, Training

ADAMW = "AdamW: "  # how the names of rows with another optimizer than the default's begin
# The best of those tried, for both sides of the headline. Rows on fewer bytes were measured at
# twice that, and are beside each other: on 2 MB it makes no difference to the blocks.
HEADLINE_RATE, RATE = 1e-3, 2e-3
# One of each way to train, in under a minute.
QUICK = (
    "default, seed 0",
    "end-to-end, seed 0",
    "independent",
    "independent, z removed",
    "relay, copies 50 steps old",
)


def run_of(megabytes: float, seed: int = 0, **changes: Any) -> Run:
    """The default run at a size, with some fields changed."""
    base = Run(seed=seed)
    shape = {k: v for k, v in changes.items() if k in ModelShape.__dataclass_fields__}
    noise = {k: v for k, v in changes.items() if k in Noise.__dataclass_fields__}
    training = {k: v for k, v in changes.items() if k in Training.__dataclass_fields__}
    assert len(shape) + len(noise) + len(training) == len(changes), changes
    steps = round(megabytes * 1e6 / (base.training.batch * base.model.context))
    return replace(
        base,
        model=replace(base.model, **shape),
        noise=replace(base.noise, **noise),
        training=replace(base.training, **{"steps": steps, **training}),
    )


def variants(quick: bool) -> list[Variant]:
    """The table, most wanted first: a cut-off session leaves the best part."""
    headline, other = (0.012, 0.012) if quick else (6.0, 2.0)
    size = 4096 if quick else EVALUATION_BYTES
    seeds = (0,) if quick else (0, 1, 2)
    rows: list[Variant] = []

    def add(name: str, megabytes: float, seed: int = 0, **changes: Any) -> None:
        changes.setdefault("learning_rate", RATE)
        special = {k: changes.pop(k) for k in list(changes) if k in Variant.__dataclass_fields__}
        run = run_of(megabytes, seed, **changes)
        rows.append(Variant(name, run, evaluation_bytes=size, **special))

    alone: dict[str, Any] = {"coupling": "independent", "blocks": 1}
    best: dict[str, Any] = {"learning_rate": HEADLINE_RATE}
    for seed in seeds:
        add(f"default, seed {seed}", headline, seed, **best)
        add(f"end-to-end, seed {seed}", headline, seed, end_to_end=True, **best)
    add("one block on 4 times the headline's bytes", 4 * headline, **alone, **best)
    lower: dict[str, Any] = {"learning_rate": HEADLINE_RATE / 2}  # steps are 4 times as many
    add("one block on 4 times the headline's bytes at 0.0005", 4 * headline, **alone, **lower)
    for rate in (1e-3, 2e-3, 4e-3):
        add(f"end-to-end, learning rate {rate:g}", other, end_to_end=True, learning_rate=rate)
    add("end-to-end, 6 MB, learning rate 0.0005", headline, end_to_end=True, **lower)
    add("look-ahead, copies 50 steps old", other)
    add("look-ahead, the copy ahead learns, 6 MB", headline, ahead_learns=True)
    add("independent", other, coupling="independent")
    add("independent, z removed", other, coupling="independent", objective="plain")
    add("one block on 4 times the bytes", 4 * other, **alone)
    add("relay, copies 50 steps old", other, coupling="relay")
    add("look-ahead, z removed", other, objective="plain")
    add("end-to-end, a loss at every second layer", other, end_to_end=True, heads_every=2)
    add("end-to-end in the wall-clock of look-ahead", headline / 1.8, end_to_end=True, **best)
    for seed in seeds:
        add(f"default at 0.002, seed {seed}", headline, seed)
        add(f"end-to-end at 0.002, seed {seed}", headline, seed, end_to_end=True)
    add("one block on 4 times 6 MB at 0.002", 4 * headline, **alone)
    add("look-ahead, copies 200 steps old", other, steps_per_round=200)
    add("look-ahead, copies 10 steps old", other, steps_per_round=10)
    fresh: dict[str, Any] = {"steps_per_round": 1, "staggered": False, "copy_steps": 1.0}
    add("look-ahead, fresh copies", other, **fresh)
    edm = {"objective": "edm", "coupling": "independent", "leak_limit_nats": 1.0}
    add("independent, edm", other, sigma_min=1.0, **edm)
    add("look-ahead, block 1 offline for a fifth", other, offline=(1, 0.4, 0.6))
    add("look-ahead, 2 blocks of 4 layers", other, blocks=2, layers=4)
    add("relay, fresh copies", other, coupling="relay", **fresh)
    for age in (10, 200):
        add(f"relay, copies {age} steps old", other, coupling="relay", steps_per_round=age)
    add("look-ahead, 8 blocks of 1 layer", other, blocks=8, layers=1)
    add("look-ahead, copies 50 steps old, trained on newest versions", other, staggered=False)
    for steps in (10.0, 60.0):
        add(f"look-ahead, copies move 1/{steps:g} a step", other, copy_steps=steps)
    add("look-ahead, the copy ahead learns", other, ahead_learns=True)
    add("look-ahead, every block its own bytes", other, own_streams=True)
    for rate in (1e-3, 4e-3):
        add(f"look-ahead, learning rate {rate:g}", other, learning_rate=rate)
    if quick:
        return [row for row in rows if row.name in QUICK]
    _add_adamw(lambda *a, **changes: add(*a, optimizer="adamw", **changes), headline, other)
    return rows


def _add_adamw(add: Callable[..., None], headline: float, other: float) -> None:
    """With AdamW for all weights, as everything was before Muon was tried: what was measured."""
    add("AdamW: default at 0.002, seed 0", headline)
    add("AdamW: end-to-end at 0.002, seed 0", headline, end_to_end=True)
    for rate in (1.5e-3, 2e-3, 3e-3):
        name = f"AdamW: end-to-end, learning rate {rate:g}"
        add(name, other, end_to_end=True, learning_rate=rate)
    add("AdamW: look-ahead, copies 50 steps old", other)
    add("AdamW: independent", other, coupling="independent")
    add("AdamW: independent, z removed", other, coupling="independent", objective="plain")
    add("AdamW: one block on 4 times the bytes", 4 * other, coupling="independent", blocks=1)
    add("AdamW: end-to-end, a loss at every second layer", other, end_to_end=True, heads_every=2)
    # From before copies moved and before the learning rate was tuned.
    jump: dict[str, Any] = {"copy_steps": 1.0, "learning_rate": 3e-3}
    name = "AdamW: end-to-end, 6 MB, learning rate 0.003"
    add(name, headline, end_to_end=True, learning_rate=3e-3)
    add("AdamW: copies that jump, 6 MB", headline, **jump)
    add("AdamW: copies that jump", other, **jump)
    add("AdamW: copies that jump, 10 steps old", other, steps_per_round=10, **jump)
    add("AdamW: copies that jump, z removed", other, objective="plain", **jump)
    add("AdamW: copies that jump, trained on newest versions", other, staggered=False, **jump)
    for rate in (2e-3, 5e-3):
        name = f"AdamW: copies that jump, learning rate {rate:g}"
        add(name, other, **{**jump, "learning_rate": rate})
    name = "AdamW: copies that jump, look-ahead's loss with weight 3"
    add(name, other, look_ahead_weight=3.0, **jump)


def figures(rows: harness.Rows) -> harness.Figures:
    """The numbers that the README quotes; those whose rows are not there yet are left out. Those of
    AdamW, which is not the default, have names that say so."""
    return harness.figures_apart(rows, ADAMW, "adamw_", _figures)


def _figures(rows: harness.Rows) -> harness.Figures:
    by_name = {row["name"]: row["ce"] for row in rows}
    out = _pairs(by_name, "default, seed ", "end-to-end, seed ", "")
    out |= _pairs(by_name, "default at 0.002, seed ", "end-to-end at 0.002, seed ", "_rate_0_002")
    for name, row in (
        ("ce_control_4x", "one block on 4 times the bytes"),  # beside ce_stale_50
        ("ce_control_4x_6mb", "one block on 4 times the headline's bytes"),  # beside ce_composed
        ("ce_control_4x_rate_0_0005", "one block on 4 times the headline's bytes at 0.0005"),
        ("ce_control_4x_rate_0_002", "one block on 4 times 6 MB at 0.002"),
        ("ce_z_removed", "look-ahead, z removed"),
        ("ce_stale_50", "look-ahead, copies 50 steps old"),
        ("ce_end_to_end_2mb", "end-to-end, learning rate 0.002"),
        ("ce_end_to_end_rate_0_0005", "end-to-end, 6 MB, learning rate 0.0005"),
    ):
        if row in by_name:
            out[name] = by_name[row]
    if {"ce_stale_50", "ce_end_to_end_2mb"} <= out.keys():
        out["ce_gap_2mb"] = out["ce_stale_50"] - out["ce_end_to_end_2mb"]
    if "independent" in by_name:
        independent = next(row for row in rows if row["name"] == "independent")
        out["ce_single_block"] = min(independent["ce_newest_blocks"])
    return out


def _pairs(by_name: dict[str, float], ours: str, theirs: str, ending: str) -> harness.Figures:
    """The blocks beside end-to-end training with the same seed, for all seeds that have both."""
    seeds = [s for s in range(3) if {f"{ours}{s}", f"{theirs}{s}"} <= by_name.keys()]
    if not seeds:
        return {}
    gaps = [by_name[f"{ours}{s}"] - by_name[f"{theirs}{s}"] for s in seeds]
    out: harness.Figures = {
        "ce_composed": statistics.fmean(by_name[f"{ours}{s}"] for s in seeds),
        "ce_end_to_end": statistics.fmean(by_name[f"{theirs}{s}"] for s in seeds),
        "ce_gap": statistics.fmean(gaps),
        "ce_pairs": len(seeds),
        **{f"ce_gap_seed_{seed}": gap for seed, gap in zip(seeds, gaps, strict=True)},
    }
    if len(gaps) > 1:
        out["ce_standard_error"] = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return {name + ending: value for name, value in out.items()}
