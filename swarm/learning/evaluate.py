"""Honest and teacher-forced cross entropy, in nats per byte.

Honest: the prediction is complete before the targets are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.errors import UsageError
from swarm.learning.composition import ComposedModel
from swarm.learning.noise import block_interval
from swarm.learning.objective import DenoisingObjective
from swarm.learning.worker import relayed_hidden, step_generator


@dataclass(frozen=True)
class Evaluation:
    """CE of the composition and of each block alone, over `size_bytes` predicted bytes."""

    ce_nats: float
    block_ce_nats: tuple[float | None, ...]
    size_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return _bits(self.ce_nats)

    @property
    def perplexity(self) -> float:
        return _perplexity(self.ce_nats)

    @property
    def block_bits_per_byte(self) -> tuple[float | None, ...]:
        return tuple(None if ce is None else _bits(ce) for ce in self.block_ce_nats)

    @property
    def block_perplexity(self) -> tuple[float | None, ...]:
        return tuple(None if ce is None else _perplexity(ce) for ce in self.block_ce_nats)


def _bits(ce_nats: float) -> float:
    return ce_nats / math.log(2)


def _perplexity(ce_nats: float) -> float:
    return math.exp(ce_nats) if ce_nats < 700.0 else math.inf


def nll_sum(log_probs: Tensor, y: Tensor) -> float:
    """Sum of -log p of the true bytes, in float64 since thousands of windows are added up."""
    return -float(log_probs.gather(-1, y.unsqueeze(-1)).cpu().double().sum())  # MPS has no double


def honest_ce(model: ComposedModel, batches: Iterable[Tensor]) -> Evaluation:
    """Evaluate on windows of bytes: inputs are all but the last of each, targets all but the first.

    The prediction is complete before the targets are read.
    """
    total, count = 0.0, 0
    each_total: list[float] = [0.0] * len(model.blocks)
    generator = torch.Generator().manual_seed(0)
    for windows in batches:
        x, y = windows[:, :-1].to(model.device), windows[:, 1:].to(model.device)
        each = model.block_log_probs(x, generator)
        total += nll_sum(model.compose(each), y)
        for index, log_prob in enumerate(each):
            each_total[index] += 0.0 if log_prob is None else nll_sum(log_prob, y)
        count += y.numel()
    if count == 0:
        raise UsageError("there is not one window to evaluate on", "give a longer text")
    blocks = tuple(
        None if block is None else each_total[index] / count
        for index, block in enumerate(model.blocks)
    )
    return Evaluation(total / count, blocks, count)


@torch.no_grad()
def teacher_forced_ce(model: ComposedModel, batches: Iterable[Tensor], index: int) -> float:
    """A block's CE with z made from the target, as in training.

    Beside the honest CE it shows what the block reads out of its own target; it says nothing of
    quality.
    """
    run, block = model.run, model.blocks[index]
    if block is None:
        raise UsageError(f"block {index} is missing from this model")
    interval = block_interval(run.noise, run.model.blocks, index)
    objective = DenoisingObjective(run.training.objective, run.noise, interval, model.targets)
    before = [b for b in model.blocks[:index] if b is not None]
    total, count = 0.0, 0
    for number, windows in enumerate(batches):
        x, y = windows[:, :-1].to(model.device), windows[:, 1:].to(model.device)
        relay = relayed_hidden(before, x) if run.model.relays else None
        generator = step_generator(run.seed, index, number)
        ce = objective.teacher_forced_ce(block, x, y, relay, generator)
        total += float(ce) * y.numel()
        count += y.numel()
    if count == 0:
        raise UsageError("there is not one window to evaluate on", "give a longer text")
    return total / count
