"""One worker: it trains one block, and only that block, on the local denoising objective.

It holds optimizer state for its own block alone. Other blocks reach it as frozen, forward-only
copies: those before it give the relayed hidden state, the next one gives the look-ahead loss. No
gradient leaves the worker. Where copies and batches come from is not its concern.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.model import Block, make_block
from swarm.noise import block_interval, target_table
from swarm.objective import DenoisingObjective
from swarm.run import Run

AHEAD_PARTS = 2


@dataclass(frozen=True)
class StepLoss:
    """Nats per byte of one step: the block's own loss, and the next block's through its copy."""

    own_nats: float
    ahead_nats: float | None


class BlockWorker:
    """The block, its optimizer and its objective.

    `autocast` is the precision that forward passes may drop to; weights and optimizer stay fp32.
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
        self.optimizer = block_optimizer(run, self.block)
        self.steps_done = 0

    def step(
        self, x: Tensor, y: Tensor, upstream: Sequence[Block], next_block: Block | None
    ) -> StepLoss:
        """One optimizer step on a batch of inputs and targets."""
        generator = step_generator(self.run.seed, self.index, self.steps_done)
        self.optimizer.zero_grad(set_to_none=True)
        with self._precision():
            relay = relayed_hidden(upstream, x) if self.run.model.relays else None
            own, hidden = self.objective.loss(self.block, x, y, relay, generator)
            ahead: float | None = None
            if hidden is not None and next_block is not None and self.ahead is not None:
                ahead, gradient = self._look_ahead(next_block, x, y, hidden, generator)
                torch.autograd.backward([own, hidden], [None, gradient])
            else:
                own.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._update()
        return StepLoss(own.item(), ahead)

    def _look_ahead(
        self, copy: Block, x: Tensor, y: Tensor, hidden: Tensor, generator: torch.Generator
    ) -> tuple[float, Tensor]:
        """The next block's loss over our hidden state, and its weighted gradient by it.

        A part of the batch at a time: the copy's activations are most of what look-ahead adds to
        a worker's memory, and they need not outlive their part.
        """
        assert self.ahead is not None
        leaf = hidden.detach().requires_grad_()
        total = 0.0
        for part in torch.arange(len(x)).chunk(AHEAD_PARTS):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            loss, _ = self.ahead.loss(copy, x[rows], y[rows], leaf[rows], generator)
            share = len(part) / len(x)
            (loss * (share * self.run.training.look_ahead_weight)).backward()  # type: ignore[no-untyped-call]
            total += share * loss.item()
        assert leaf.grad is not None
        return total, leaf.grad

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _update(self) -> None:
        training = self.run.training
        for group in self.optimizer.param_groups:
            group["lr"] = training.learning_rate_at(self.steps_done)
        torch.nn.utils.clip_grad_norm_(self.block.parameters(), training.clip_norm)
        self.optimizer.step()
        self.steps_done += 1

    def _objective_of(self, block: int) -> DenoisingObjective:
        interval = block_interval(self.run.noise, self.run.model.blocks, block)
        return DenoisingObjective(
            self.run.training.objective, self.run.noise, interval, self.targets
        )


def initial_block(run: Run, block: int) -> Block:
    """The block's weights at version 0: equal on every host of the run."""
    generator = torch.Generator().manual_seed(run.seed * 1_000_003 + block)
    return make_block(run.model, run.training.objective, block, generator)


def block_optimizer(run: Run, module: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    training = run.training
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        fused=True,
    )


@torch.no_grad()
def relayed_hidden(upstream: Sequence[Block], x: Tensor) -> Tensor | None:
    """The hidden state that reaches a block from forward-only copies of those before it."""
    relay: Tensor | None = None
    for block in upstream:
        relay = block.hidden(x, relay)
    return relay


def step_generator(seed: int, block: int, step: int) -> torch.Generator:
    """Noise as a pure function of (seed, block, step): a resumed run draws what it would have."""
    mixed = (seed * 0x9E3779B97F4A7C15 + block * 0xC2B2AE3D27D4EB4F + step) % 2**63
    return torch.Generator().manual_seed(mixed)
