"""Rows of the benchmarks that train with `benchmarks.exchange`: their sizes, their CE, their cost.

Decides which bytes a model is judged by and what a small run looks like. Honest CE of the assembled
model in every case.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.corpus import benchmark_corpus
from benchmarks.exchange import Diverged, ExchangeSwarm
from node.data.windows import evaluation_windows
from swarm.learning.composition import fit_composition
from swarm.learning.evaluate import honest_ce
from swarm.run import ModelShape, Run, Training, usual_learning_rate

DEFAULT = "topk:0.02:2:overall"  # the codec of the presets
UNIFORM_CE = float(np.log(256))  # of a model that has learnt nothing: what a diverged one is worth


@dataclass(frozen=True)
class SmallRow:
    """A row of three thin blocks: enough to see who harms whom, in minutes."""

    STEPS: ClassVar[int] = 4
    ROUNDS: ClassVar[int] = 40

    name: str
    _: KW_ONLY
    quick: bool = False
    rounds: int = ROUNDS

    @property
    def key(self) -> str:
        optimizer = Training().optimizer
        fields = {**asdict(self), "steps": self.STEPS, "codec": DEFAULT, "optimizer": optimizer}
        return json.dumps(fields, sort_keys=True)

    @property
    def run(self) -> Run:
        width, context = (32, 64) if self.quick else (128, 128)
        return run_of(self.rounds, self.STEPS, 0, ModelShape(3, 1, width, 4, context))

    @staticmethod
    def size(quick: bool) -> dict[str, Any]:
        return {"quick": True, "rounds": 8} if quick else {}


class HeldOut:
    """Bytes that nobody trains on: some for a curve, more for the end, others for the fit."""

    def __init__(self, run: Run, end_bytes: int, curve_bytes: int, fit_bytes: int) -> None:
        valid, context = benchmark_corpus().valid, run.model.context
        self.end = _windows(valid, context, end_bytes)
        self.curve = _windows(valid, context, curve_bytes)
        self.fit = torch.cat(_windows(valid[-2 * fit_bytes :], context, fit_bytes))

    def curve_ce(self, swarm: ExchangeSwarm) -> float:
        return honest_ce(swarm.assembled(), self.curve).ce_nats

    def end_ce(self, swarm: ExchangeSwarm) -> float:
        """With the composition fitted, as an assembler does."""
        model = fit_composition(swarm.assembled(), self.fit[:, :-1], self.fit[:, 1:])
        return honest_ce(model, self.end).ce_nats


def _windows(data: npt.NDArray[np.uint8], context: int, limit: int) -> list[torch.Tensor]:
    windows = torch.from_numpy(evaluation_windows(data, context, limit).copy()).long()
    return [windows[at : at + 64] for at in range(0, len(windows), 64)]


def cpu_minutes(run: Run, replicas: Sequence[int]) -> float:
    """About what a row takes, for who has to wait: 0.065 s a layer of 128, a worker and a step."""
    step_s = 0.065 * run.model.layers * (run.model.width / 128) ** 2
    step_s *= run.training.batch * run.model.context / 1024
    return run.training.steps * sum(replicas) * step_s / 60


def run_of(
    rounds: int, steps_per_round: int, seed: int = 0, shape: ModelShape | None = None
) -> Run:
    """The default run with as many rounds."""
    base = Run(model=shape or ModelShape(), seed=seed)
    steps = rounds * steps_per_round
    training = replace(
        base.training,
        steps=steps,
        steps_per_round=steps_per_round,
        warmup_steps=min(40, steps // 10),
        learning_rate=usual_learning_rate(steps),
    )
    return replace(base, training=training)


def train(swarm: ExchangeSwarm, rounds: int, held_out: HeldOut) -> dict[str, Any]:
    """All rounds, then what every row says of them. A swarm that diverged is worth a guess."""
    began = time.process_time()
    diverged = ""
    try:
        for _ in range(rounds):
            swarm.one_round()
        swarm.settle()
        ce = held_out.end_ce(swarm)
    except Diverged as error:
        diverged, ce = error.message, UNIFORM_CE
    if not np.isfinite(ce):
        diverged, ce = "the assembled model is not a number", UNIFORM_CE
    run = swarm.run
    return {
        "ce": ce,
        "diverged": diverged,
        "rounds": rounds,
        "steps_per_round": run.training.steps_per_round,
        "bytes_seen_per_worker": run.training.steps * run.training.batch * run.model.context,
        "shape": f"{run.model.blocks}x{run.model.layers}, width {run.model.width}",
        "replicas": "-".join(str(len(group.members)) for group in swarm.groups),
        "codec": swarm.rules.codec,
        "cpu_seconds": round(time.process_time() - began, 1),
    }
