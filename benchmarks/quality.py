"""What block-wise training costs in quality: honest CE beside an end-to-end Transformer.

Byte-level WikiText-2, all rows on the same batches in the same order, CE over 250 kB of the valid
split. Composition weights are fitted on other bytes of it. Rows differ in one thing each; those
that could refute us are among them (z removed, one block on four times the bytes, no relay).
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import harness
from benchmarks.unfinished import Unfinished
from node.data import benchmark_corpus
from node.memory import keep_freed_memory
from node.windows import WindowStream, evaluation_windows, stream_seed
from protocol.errors import DataError
from swarm.composition import ComposedModel, fit_composition
from swarm.evaluate import honest_ce, nll_sum, teacher_forced_ce
from swarm.local import LocalSwarm
from swarm.reference import ReferenceWorker
from swarm.run import ModelShape, Noise, Run, Training

EVALUATION_BYTES = 250_000
FIT_BYTES = 65_536
CPU = torch.device("cpu")
ADAMW = "AdamW: "  # how the names of rows with another optimizer than the default's begin
ONLY_OF_BLOCKS = (
    "objective",
    "steps_per_round",
    "short_rounds",
    "look_ahead_weight",
    "staggered",
    "copy_steps",
    "ahead_learns",
)


@dataclass(frozen=True)
class Variant:
    """One row: a run, and what is special about how it is trained."""

    name: str
    run: Run
    end_to_end: bool = False
    heads_every: int = 0
    own_streams: bool = False  # every block draws its own bytes, as hosts in a swarm do
    offline: tuple[int, float, float] | None = None  # block, from, to (shares of the run)
    evaluation_bytes: int = EVALUATION_BYTES
    tags: tuple[str, ...] = field(default=())

    @property
    def key(self) -> str:
        # What is off or has no effect is left out, so that a new option does not ask for every
        # row again.
        fields = asdict(self)
        if self.end_to_end:
            fields["run"] |= {"noise": {}, "model": {**fields["run"]["model"], "coupling": ""}}
            for name in ONLY_OF_BLOCKS:
                fields["run"]["training"].pop(name)
        if self.run.training.optimizer == "adamw":  # rows from before there was another one
            fields["run"]["training"].pop("optimizer")
        return json.dumps(_without_unset(fields), sort_keys=True)


def _without_unset(fields: dict[str, Any]) -> dict[str, Any]:
    nested = {k: _without_unset(v) if isinstance(v, dict) else v for k, v in fields.items()}
    return {k: v for k, v in nested.items() if v or k == "seed"}


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
    headline, other = (0.05, 0.03) if quick else (6.0, 2.0)
    size = 16_384 if quick else EVALUATION_BYTES
    seeds = (0,) if quick else (0, 1, 2)
    rows: list[Variant] = []

    def add(name: str, megabytes: float, seed: int = 0, **changes: Any) -> None:
        special = {k: changes.pop(k) for k in list(changes) if k in Variant.__dataclass_fields__}
        run = run_of(megabytes, seed, **changes)
        rows.append(Variant(name, run, evaluation_bytes=size, **special))

    for seed in seeds:
        add(f"default, seed {seed}", headline, seed)
        add(f"end-to-end, seed {seed}", headline, seed, end_to_end=True)
    for rate in (1e-3, 2e-3, 4e-3):
        add(f"end-to-end, learning rate {rate:g}", other, end_to_end=True, learning_rate=rate)
    add("look-ahead, copies 50 steps old", other)
    add("look-ahead, the copy ahead learns, 6 MB", headline, ahead_learns=True)
    add("independent", other, coupling="independent")
    add("independent, z removed", other, coupling="independent", objective="plain")
    add("one block on 4 times the bytes", 4 * other, coupling="independent", blocks=1)
    add("one block on 4 times 6 MB", 4 * headline, coupling="independent", blocks=1)
    add("relay, copies 50 steps old", other, coupling="relay")
    add("look-ahead, z removed", other, objective="plain")
    add("end-to-end, a loss at every second layer", other, end_to_end=True, heads_every=2)
    add("end-to-end in the wall-clock of look-ahead", headline / 1.8, end_to_end=True)
    add("end-to-end, 6 MB, learning rate 0.001", headline, end_to_end=True, learning_rate=1e-3)
    add("look-ahead, 6 MB, learning rate 0.001", headline, learning_rate=1e-3)
    add("look-ahead, copies 200 steps old", other, steps_per_round=200)
    add("look-ahead, copies 10 steps old", other, steps_per_round=10)
    add("look-ahead, fresh copies", other, steps_per_round=1, staggered=False, copy_steps=1.0)
    edm = {"objective": "edm", "coupling": "independent", "leak_limit_nats": 1.0}
    add("independent, edm", other, sigma_min=1.0, **edm)
    add("look-ahead, block 1 offline for a fifth", other, offline=(1, 0.4, 0.6))
    add("look-ahead, 2 blocks of 4 layers", other, blocks=2, layers=4)
    for age in (1, 10, 200):
        add(f"relay, copies {age} steps old", other, coupling="relay", steps_per_round=age)
    add("look-ahead, 8 blocks of 1 layer", other, blocks=8, layers=1)
    add("look-ahead, copies 50 steps old, trained on newest versions", other, staggered=False)
    add("look-ahead, no short rounds early", other, short_rounds=0)
    for steps in (10.0, 60.0):
        add(f"look-ahead, copies move 1/{steps:g} a step", other, copy_steps=steps)
    add("look-ahead, the copy ahead learns", other, ahead_learns=True)
    add("look-ahead, every block its own bytes", other, own_streams=True)
    for rate in (1e-3, 4e-3):
        add(f"look-ahead, learning rate {rate:g}", other, learning_rate=rate)
    if not quick:
        _add_adamw(lambda *a, **changes: add(*a, optimizer="adamw", **changes), headline, other)
    return rows


def _add_adamw(add: Callable[..., None], headline: float, other: float) -> None:
    """With AdamW for all weights, as everything was before Muon was tried: what was measured."""
    add("AdamW: default, seed 0", headline)
    add("AdamW: end-to-end, seed 0", headline, end_to_end=True)
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


def measure(
    variant: Variant, unfinished: Path | None = None, origin: dict[str, str] | None = None
) -> dict[str, Any]:
    """Train one row and evaluate it, on one thread; go on with what is in the folder
    `unfinished`, if it is of the same `origin` as the code that runs."""
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    run, text = variant.run, Text(variant)
    learner: Learner = EndToEnd(variant) if variant.end_to_end else Blocks(variant)
    kept = Unfinished(unfinished, variant.key, origin) if unfinished and origin else None
    clock = train(variant, learner, text, kept)
    began_s = time.process_time()
    result = learner.result(text)
    if kept is not None:
        kept.remove()
    return {
        "coupling": "end-to-end" if variant.end_to_end else run.model.coupling,
        "objective": "plain" if variant.end_to_end else run.training.objective,
        "shape": f"{run.model.blocks}x{run.model.layers}",
        "sigma": [run.noise.sigma_min, run.noise.sigma_max],
        "copies_age_steps": run.training.steps_per_round,
        "seed": run.seed,
        "learning_rate": run.training.learning_rate,
        "optimizer": run.training.optimizer,
        "bytes_seen_per_block": run.training.steps * run.training.batch * run.model.context,
        **result,
        "curve": clock.curve,
        "training_cpu_s": round(clock.training_s / learner.workers, 1),  # of one, on average
        "cpu_seconds": round(clock.cpu_s + time.process_time() - began_s, 1),
    }


class Text:
    """The bytes of a row: batches by step, and held-out windows."""

    def __init__(self, variant: Variant) -> None:
        run = variant.run
        corpus = benchmark_corpus()
        context = run.model.context
        streams = run.model.blocks if variant.own_streams else 1
        self.streams = [
            WindowStream(
                corpus.train, context, run.training.batch, stream_seed("windows", run.seed, number)
            )
            for number in range(streams)
        ]
        fit_bytes = min(FIT_BYTES, variant.evaluation_bytes)
        self.held_out = _windows(corpus.valid, context, variant.evaluation_bytes)
        self.fit = torch.cat(_windows(corpus.valid[-2 * fit_bytes :], context, fit_bytes))
        if variant.evaluation_bytes + 2 * fit_bytes > len(corpus.valid):
            raise DataError(
                f"valid has {len(corpus.valid)} bytes: what is fitted on would be reported too",
                "take a longer text, or fewer bytes to evaluate on",
            )

    def batch(self, step: int, stream: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.streams[stream % len(self.streams)]
        windows = torch.from_numpy(chosen.batch_at(step)).long()
        return windows[:, :-1], windows[:, 1:]


def _windows(data: Any, context: int, limit_bytes: int) -> list[torch.Tensor]:
    windows = torch.from_numpy(evaluation_windows(data, context, limit_bytes).copy()).long()
    return list(windows.split(64))


class Learner(Protocol):
    """What a row trains."""

    workers: int

    def step(self, number: int, text: Text) -> None: ...

    def ce(self, batches: list[torch.Tensor]) -> float:
        """Honest CE as it is now."""

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...

    def load_state(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None: ...

    def result(self, text: Text) -> dict[str, Any]:
        """What the row says of it in the end."""


@dataclass
class Clock:
    """What a row in training has cost so far, earlier sittings included, and its curve."""

    training_s: float = 0.0
    cpu_s: float = 0.0
    curve: list[list[float]] = field(default_factory=list)  # bytes seen, CE


def train(variant: Variant, learner: Learner, text: Text, kept: Unfinished | None) -> Clock:
    """All steps of a row, or those that are left of it."""
    steps, clock, first = variant.run.training.steps, Clock(), 0
    if kept is not None and (found := kept.load()):
        tensors, facts = found
        learner.load_state(tensors, facts["numbers"])
        clock, first = Clock(**facts["clock"]), facts["steps_done"]
        print(f"{variant.name}: goes on at step {first} of {steps}", flush=True)
    cpu_s = time.process_time() - clock.cpu_s
    for number in range(first, steps):
        began_s = time.process_time()
        learner.step(number, text)
        clock.training_s += time.process_time() - began_s
        if _due(number + 1, steps):
            clock.curve.append([_seen(variant, number + 1), learner.ce(text.held_out[:4])])
            clock.cpu_s = time.process_time() - cpu_s
            if kept is not None:
                tensors, numbers = learner.state()
                facts = {"numbers": numbers, "clock": asdict(clock), "steps_done": number + 1}
                kept.save(tensors, facts)
    clock.cpu_s = time.process_time() - cpu_s
    return clock


class EndToEnd:
    """The same layers with gradients through all of them."""

    workers = 1

    def __init__(self, variant: Variant) -> None:
        self.worker = ReferenceWorker(variant.run, CPU, variant.heads_every)

    def step(self, number: int, text: Text) -> None:
        self.worker.step(*text.batch(number))

    def ce(self, batches: list[torch.Tensor]) -> float:
        return self._ce_of_heads(batches)[-1]

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return self.worker.state(), {}

    def load_state(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        self.worker.load_state(tensors)

    def result(self, text: Text) -> dict[str, Any]:
        heads = self._ce_of_heads(text.held_out)
        return {"ce": heads[-1], "ce_heads": heads}

    def _ce_of_heads(self, batches: list[torch.Tensor]) -> list[float]:
        totals, count = [0.0] * len(self.worker.model.heads), 0
        for windows in batches:
            each = self.worker.head_log_probs(windows[:, :-1])
            totals = [t + nll_sum(lp, windows[:, 1:]) for t, lp in zip(totals, each, strict=True)]
            count += windows[:, 1:].numel()
        return [total / count for total in totals]


class Blocks:
    """A worker for each block, as in a swarm."""

    def __init__(self, variant: Variant) -> None:
        self.variant, self.workers = variant, variant.run.model.blocks
        self.swarm = LocalSwarm(variant.run, CPU)

    def step(self, number: int, text: Text) -> None:
        batches = [text.batch(number, block) for block in range(self.workers)]
        self.swarm.step_each(batches, _offline(self.variant, number))

    def ce(self, batches: list[torch.Tensor]) -> float:
        return honest_ce(self._composed(), batches).ce_nats

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return self.swarm.state()

    def load_state(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        self.swarm.load_state(tensors, numbers)

    def result(self, text: Text) -> dict[str, Any]:
        model, few = self._composed(), text.held_out[:4]
        return {
            **_compositions(self.variant.run, self.swarm, text),
            "teacher_forced_ce_blocks": [
                teacher_forced_ce(model, few, index) for index in range(self.workers)
            ],
        }

    def _composed(self) -> ComposedModel:
        return ComposedModel(self.variant.run, self.swarm.composed_blocks())


def _compositions(run: Run, swarm: LocalSwarm, text: Text) -> dict[str, Any]:
    """CE of each way to put the blocks together; `ce` is the default's, with fitted weights."""
    out: dict[str, Any] = {}
    ways = {"staggered": True, "newest": False} if run.model.relays else {"newest": False}
    for way, staggered in ways.items():
        model = ComposedModel(run, swarm.composed_blocks(staggered))
        fitted = fit_composition(model, text.fit[:, :-1], text.fit[:, 1:])
        found = honest_ce(fitted, text.held_out)
        equal = replace(model, weights=(1.0,) * run.model.blocks)
        out |= {
            f"ce_{way}_fitted": found.ce_nats,
            f"ce_{way}_mean": honest_ce(equal, text.held_out).ce_nats,
            f"ce_{way}_blocks": list(found.block_ce_nats),
            f"weights_{way}": [round(w, 4) for w in fitted.weights],
            f"temperature_{way}": round(fitted.temperature, 4),
        }
    if not run.model.relays:
        chain = replace(ComposedModel(run, swarm.composed_blocks()), composition="embedding")
        out["ce_chain"] = honest_ce(chain, text.held_out).ce_nats
    default = "staggered" if run.model.relays and run.training.staggered else "newest"
    return {"ce": out[f"ce_{default}_fitted"], **out}


def _offline(variant: Variant, step: int) -> frozenset[int]:
    if variant.offline is None:
        return frozenset()
    block, start, end = variant.offline
    share = step / variant.run.training.steps
    return frozenset({block}) if start <= share < end else frozenset()


def _due(step: int, steps: int) -> bool:
    return step % max(1, steps // 12) == 0


def _seen(variant: Variant, step: int) -> int:
    return step * variant.run.training.batch * variant.run.model.context


def figures(rows: harness.Rows) -> harness.Figures:
    """The numbers that the README quotes; those whose rows are not there yet are left out. Those of
    AdamW, which is not the default, have names that say so."""
    return harness.figures_apart(rows, ADAMW, "adamw_", _figures)


def _figures(rows: harness.Rows) -> harness.Figures:
    by_name = {row["name"]: row for row in rows}
    ours = {s: by_name.get(f"default, seed {s}") for s in range(3)}
    theirs = {s: by_name.get(f"end-to-end, seed {s}") for s in range(3)}
    pairs = {s: (o["ce"], t["ce"]) for s, o in ours.items() if o and (t := theirs[s])}
    out: harness.Figures = {}
    if pairs:
        gaps = [o - t for o, t in pairs.values()]
        out |= {
            "ce_composed": statistics.fmean(o for o, _ in pairs.values()),
            "ce_end_to_end": statistics.fmean(t for _, t in pairs.values()),
            "ce_gap": statistics.fmean(gaps),
            "ce_pairs": len(pairs),
            **{f"ce_gap_seed_{seed}": gap for seed, gap in zip(pairs, gaps, strict=True)},
        }
        if len(gaps) > 1:
            out["ce_standard_error"] = statistics.stdev(gaps) / math.sqrt(len(gaps))
    for name, row, key in (
        ("ce_control_4x", "one block on 4 times the bytes", "ce"),  # beside ce_stale_50
        ("ce_control_4x_6mb", "one block on 4 times 6 MB", "ce"),  # beside ce_composed
        ("ce_z_removed", "look-ahead, z removed", "ce"),
        ("ce_stale_50", "look-ahead, copies 50 steps old", "ce"),
        ("ce_end_to_end_2mb", "end-to-end, learning rate 0.002", "ce"),
    ):
        if row in by_name:
            out[name] = by_name[row][key]
    if {"ce_stale_50", "ce_end_to_end_2mb"} <= out.keys():
        out["ce_gap_2mb"] = out["ce_stale_50"] - out["ce_end_to_end_2mb"]
    if "independent" in by_name:
        out["ce_single_block"] = min(by_name["independent"]["ce_newest_blocks"])
    return out


def main() -> None:
    options = harness.parse("quality")
    corpus = benchmark_corpus()
    facts = {
        "data": {"source": corpus.source, "sha256": corpus.sha256, "split": "valid"},
        "seeds": [0, 1, 2],
    }
    table = variants(options.quick)
    # Asked once, before anything is measured: a commit made meanwhile is not the code that runs.
    unfinished, origin = options.out.parent / "unfinished", harness.origin()
    resuming = partial(measure, unfinished=unfinished, origin=origin)
    harness.measure_rows(options, "quality", table, resuming, figures, facts)


if __name__ == "__main__":
    main()
