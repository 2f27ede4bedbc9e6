"""One row of the quality benchmark: train it, then evaluate it, on one thread.

Decides how blocks and the end-to-end reference are trained on the same batches, what is held out,
and what a row says in the end. Which rows there are is `variants`' business.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.corpus import benchmark_corpus
from benchmarks.reference import ReferenceWorker
from benchmarks.unfinished import Unfinished
from node.data.windows import WindowStream, evaluation_windows, stream_seed
from node.machine.memory import keep_freed_memory
from protocol.errors import DataError
from swarm.learning.composition import ComposedModel, fit_composition
from swarm.learning.evaluate import honest_ce, nll_sum, teacher_forced_ce
from swarm.learning.local import LocalSwarm
from swarm.run import Run

EVALUATION_BYTES = 250_000
FIT_BYTES = 65_536
CPU = torch.device("cpu")
ONLY_OF_BLOCKS = (
    "objective",
    "steps_per_round",
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
        else:  # rows from when the first 20 rounds were shorter, which made no difference
            fields["run"]["training"]["short_rounds"] = 20
        if self.run.training.optimizer == "adamw":  # rows from before there was another one
            fields["run"]["training"].pop("optimizer")
        return json.dumps(_without_unset(fields), sort_keys=True)


def _without_unset(fields: dict[str, Any]) -> dict[str, Any]:
    nested = {k: _without_unset(v) if isinstance(v, dict) else v for k, v in fields.items()}
    return {k: v for k, v in nested.items() if v or k == "seed"}


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
