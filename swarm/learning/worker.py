"""The worker of one block: trains only that block, on the local denoising objective.

It has optimizer state for its own block alone. Other blocks are frozen, forward-only copies: those
before it give the relayed hidden state, the next one the look-ahead loss. No gradient leaves the
worker.

With `ahead_learns` the copy of the next block also follows its own gradient. It was trained on our
block as of a round ago, so its loss otherwise pulls our block back to that version. What it learns
here is never sent, and fades as the copy moves to the next version. With `denoise_share` the first
rows of a batch train `joint_denoising`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.learning.joint_denoising import JointDenoising, draw_rows
from swarm.learning.model import Block, make_block
from swarm.learning.moving_copy import Readable
from swarm.learning.noise import block_interval, target_table
from swarm.learning.objective import DenoisingObjective
from swarm.learning.optimizer import BlockOptimizer, PassingSteps
from swarm.run import Run

AHEAD_PARTS = 4
JOINT_STREAM = 1 << 16  # added to the block's number, above any block's: a separate noise stream


@dataclass(frozen=True)
class StepLoss:
    """Losses of one step, in nats per byte: the block's own, and the next block's by its copy."""

    own_nats: float
    ahead_nats: float | None
    joint_nats: float | None = None  # of the jointly denoised rows; no measure of quality


class BlockWorker:
    """The block, its optimizer and its objective.

    `autocast`: the precision of forward passes; weights and optimizer stay fp32.
    """

    def __init__(
        self, run: Run, block: int, device: torch.device, autocast: torch.dtype | None = None
    ) -> None:
        self.run = run
        self.index = block
        self.device = device
        self.autocast = autocast
        self.block = initial_block(run, block).to(device)
        self.targets = target_table(run.seed, run.model.width).to(device)
        self.objective = self._objective_of(block)
        last = block == run.model.blocks - 1
        looks_ahead = run.model.coupling == "look_ahead" and not last
        self.ahead = self._objective_of(block + 1) if looks_ahead else None
        self.joint = JointDenoising(run, self.targets) if run.denoises else None
        self.optimizer = BlockOptimizer(run.training, self.block)
        self.steps_done = 0
        self.rate_factor = 1.0  # on the learning rate: see `Training.rate_factor`

    def step(
        self, x: Tensor, y: Tensor, upstream: Sequence[Readable], next_block: Readable | None
    ) -> StepLoss:
        """One optimizer step on a batch of inputs and targets."""
        self.optimizer.zero_grad()
        joint: float | None = None
        with self._precision():
            rows = self.run.training.denoise_rows if self.joint is not None else 0
            rows = min(rows, len(x) - 1)
            share = (len(x) - rows) / len(x)
            own, ahead = self._predict(x[rows:], y[rows:], upstream, next_block, share)
            if self.joint is not None and rows:
                joint = self._denoise(self.joint, x[:rows], y[:rows], upstream, next_block, share)
        self._update()
        return StepLoss(own, ahead, joint)

    def _predict(
        self,
        x: Tensor,
        y: Tensor,
        upstream: Sequence[Readable],
        next_block: Readable | None,
        share: float,
    ) -> tuple[float, float | None]:
        """The objective's loss and the next block's; gradients are weighted by `share`."""
        generator = step_generator(self.run.seed, self.index, self.steps_done)
        relay = relayed_hidden(upstream, x) if self.run.model.relays else None
        own, hidden = self.objective.loss(self.block, x, y, relay, generator)
        weight = torch.full_like(own, share)
        if hidden is None or next_block is None or self.ahead is None:
            own.backward(weight)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            return own.item(), None
        with next_block.at_hand(keep=self.run.training.ahead_learns) as copy:
            ahead, gradient = self._look_ahead(copy, x, y, hidden, generator, share)
        torch.autograd.backward([own, hidden], [weight, gradient])
        return own.item(), ahead

    def _denoise(
        self,
        joint: JointDenoising,
        x: Tensor,
        y: Tensor,
        upstream: Sequence[Readable],
        next_block: Readable | None,
        others: float,
    ) -> float:
        """The loss of joint denoising; gradients, with look-ahead's, are weighted by 1 - others."""
        generator = step_generator(self.run.seed, self.index + JOINT_STREAM, self.steps_done)
        rows = draw_rows(x, y, self.run.model.width, generator)
        relay = joint.relayed(upstream, rows) if self.run.model.relays else None
        loss, hidden = joint.loss(self.block, self.index, rows, relay)
        with ExitStack() as read:
            total = loss
            if next_block is not None and self.ahead is not None:
                copy = read.enter_context(next_block.at_hand())
                ahead, _ = joint.loss(copy, self.index + 1, rows, hidden)
                total = loss + self.run.training.look_ahead_weight * ahead
            torch.autograd.backward([total * (1.0 - others)])  # while the copy is in full
        return loss.item()

    def _look_ahead(
        self,
        copy: Block,
        x: Tensor,
        y: Tensor,
        hidden: Tensor,
        generator: torch.Generator,
        share: float,
    ) -> tuple[float, Tensor]:
        """The next block's loss from our hidden state, and its weighted gradient by that.

        A part of the batch at a time: the copy's activations are most of the memory that look-ahead
        adds, and are freed after each part.
        """
        assert self.ahead is not None
        leaf = hidden.detach().requires_grad_()
        steps = PassingSteps(copy) if self.run.training.ahead_learns else None
        if steps is not None:
            steps.want_gradients(True)
        total = 0.0
        for part in torch.arange(len(x)).chunk(AHEAD_PARTS):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            loss, _ = self.ahead.loss(copy, x[rows], y[rows], leaf[rows], generator)
            size = len(part) / len(x)
            weight = size * self.run.training.look_ahead_weight * share
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            total += size * loss.item()
        if steps is not None:
            steps.step(self.run.training.learning_rate_at(self.steps_done))
            steps.want_gradients(False)
        assert leaf.grad is not None
        return total, leaf.grad

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _update(self) -> None:
        training = self.run.training
        torch.nn.utils.clip_grad_norm_(self.block.parameters(), training.clip_norm)
        self.optimizer.step(self.rate_factor * training.learning_rate_at(self.steps_done))
        self.steps_done += 1

    def _objective_of(self, block: int) -> DenoisingObjective:
        interval = block_interval(self.run.noise, self.run.model.blocks, block)
        return DenoisingObjective(
            self.run.training.objective, self.run.noise, interval, self.targets
        )


def initial_block(run: Run, block: int) -> Block:
    """The block at version 0: equal on every host of the run."""
    generator = torch.Generator().manual_seed(run.seed * 1_000_003 + block)
    return make_block(run.model, run.training.objective, block, generator, run.denoises)


@torch.no_grad()
def relayed_hidden(upstream: Sequence[Readable], x: Tensor) -> Tensor | None:
    """The hidden state relayed to a block, from forward-only copies of those before it."""
    relay: Tensor | None = None
    for copy in upstream:
        with copy.at_hand() as block:
            relay = block.hidden(x, relay)
    return relay


def step_generator(seed: int, block: int, step: int) -> torch.Generator:
    """The generator of a step's noise, from (seed, block, step): a resumed run draws the same."""
    mixed = (seed * 0x9E3779B97F4A7C15 + block * 0xC2B2AE3D27D4EB4F + step) % 2**63
    return torch.Generator().manual_seed(mixed)
