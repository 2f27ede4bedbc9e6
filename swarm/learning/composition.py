"""Composition of the blocks' predictions to one model's.

`logit`: Euler steps on log-probabilities from 0 along u = 1 / sigma, which is their weighted mean;
works without a missing block. `embedding`: Euler steps of z in embedding space from sigma_max. No
function here takes the target bytes, which makes the CE honest by construction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from protocol.errors import UsageError
from swarm.learning.model import Block, LayerCache
from swarm.learning.noise import sigma_edges, target_table
from swarm.learning.objective import edm_logits, evidence
from swarm.run import Composition, Run

Caches = list[list[LayerCache]]


def euler_logit(log_probs: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Euler in logit space from 0: at u = 1/sigma, l <- l * u / u' + D * (1 - u / u').

    A block of weight w takes the step from u to u' = u + w, so the result is the weighted mean.
    Computed as a running state, since a sweep adds the blocks one by one.
    """
    state: Tensor | None = None
    u = 0.0
    for log_prob, weight in zip(log_probs, weights, strict=True):
        if weight == 0.0:
            continue
        after = u + weight
        state = log_prob if state is None else state * (u / after) + log_prob * (weight / after)
        u = after
    if state is None:
        raise UsageError("no block is left to compose", "give at least one block a weight above 0")
    return state


def euler_embedding(z: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """One Euler step of dz/dsigma = (z - D) / sigma."""
    return z + (z - denoised) * ((sigma_next - sigma) / sigma)


@dataclass(frozen=True)
class ComposedModel:
    """A chain of blocks as one model. Missing blocks are None and are skipped."""

    run: Run
    blocks: Sequence[Block | None]
    weights: tuple[float, ...] = ()
    temperature: float = 1.0
    composition: Composition = "logit"
    targets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if all(block is None for block in self.blocks):
            raise UsageError("the model has no block at all")
        weights = self.weights or default_weights(self.run)
        if len(weights) != len(self.blocks) or not all(0 <= w < math.inf for w in weights):
            raise UsageError(f"{len(self.blocks)} blocks need as many weights, none below 0")
        if not 0 < self.temperature < math.inf:
            raise UsageError(f"temperature is {self.temperature}; it must be above 0")
        if self.composition not in get_args(Composition):
            raise UsageError(f"unknown composition {self.composition!r}")
        present = [w if b is not None else 0.0 for w, b in zip(weights, self.blocks, strict=True)]
        if sum(present) == 0:  # all weight was on missing blocks: equal weights for the rest
            present = [0.0 if b is None else 1.0 for b in self.blocks]
        object.__setattr__(self, "weights", tuple(present))
        targets = target_table(self.run.seed, self.run.model.width)
        object.__setattr__(self, "targets", targets.to(self.device))

    @property
    def device(self) -> torch.device:
        block = next(block for block in self.blocks if block is not None)
        return block.embedding.weight.device

    def without(self, *missing: int) -> ComposedModel:
        """The same model with some blocks left out."""
        left = [None if i in missing else block for i, block in enumerate(self.blocks)]
        return replace(self, blocks=left)

    def new_caches(self) -> Caches:
        return [block.new_cache() if block is not None else [] for block in self.blocks]

    @torch.no_grad()
    def log_probs(
        self, x: Tensor, generator: torch.Generator | None = None, caches: Caches | None = None
    ) -> Tensor:
        """log p(next byte | bytes so far) at every position of x: (batch, length, 256)."""
        each = self.block_log_probs(x, generator, caches)
        return self.compose(each)

    def compose(self, each: Sequence[Tensor | None]) -> Tensor:
        """The composed log-probabilities from each block's."""
        present = [(lp, w) for lp, w in zip(each, self.weights, strict=True) if lp is not None]
        if self.composition == "embedding":
            return present[-1][0]  # the last block has the others' predictions through z
        state = euler_logit((lp for lp, _ in present), [w for _, w in present])
        return F.log_softmax(state / self.temperature, dim=-1)

    @torch.no_grad()
    def block_log_probs(
        self, x: Tensor, generator: torch.Generator | None = None, caches: Caches | None = None
    ) -> list[Tensor | None]:
        """Each block's own log-probabilities; None for a missing block.

        The generator (default: from the run's seed) draws the noise that z starts from, for `edm`
        and `embedding`. Before a missing block, z steps down to the highest sigma of the next block
        that is there.
        """
        generator = generator or torch.Generator().manual_seed(self.run.seed)
        each: list[Tensor | None] = []
        there = [index for index, block in enumerate(self.blocks) if block is not None]
        following = dict(zip(there, [*there[1:], len(self.blocks)], strict=True))
        edges = sigma_edges(self.run.noise, self.run.model.blocks)
        chained = self.composition == "embedding"
        relay: Tensor | None = None
        z = self._noise(x, edges[there[0]], generator) if chained else None
        for index, block in enumerate(self.blocks):
            if block is None:
                each.append(None)
                continue
            cache = None if caches is None else caches[index]
            sigma = torch.full((x.shape[0],), edges[index], device=x.device)
            if self.run.training.objective == "edm":
                start = z if z is not None else self._noise(x, edges[index], generator)
                logits = edm_logits(block, x, start, sigma, self.targets, cache)
            else:
                relay = block.hidden(x, relay, cache)
                logits = block.logits(relay)
                if z is not None:
                    logits = logits + evidence(z, self.targets, sigma)
            log_prob = F.log_softmax(logits.float(), dim=-1)
            each.append(log_prob)
            if z is not None:
                denoised = log_prob.exp() @ self.targets
                z = euler_embedding(z, denoised, edges[index], edges[following[index]])
        return each

    def _noise(self, x: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
        """The initial z: noise of standard deviation sigma."""
        shape = (*x.shape, self.run.model.width)
        return sigma * torch.randn(shape, generator=generator).to(x.device)


# For models that will be served: blocks that are worth less than this are left out.
SPARE_NATS = 0.005


def default_weights(run: Run) -> tuple[float, ...]:
    """Equal weights for independent blocks. With relay all on the last, which reads the others."""
    if not run.model.relays:
        return (1.0,) * run.model.blocks
    return (*(0.0,) * (run.model.blocks - 1), 1.0)


def fit_composition(
    model: ComposedModel, inputs: Tensor, targets: Tensor, spare_nats: float = 0.0
) -> ComposedModel:
    """Fit a weight per block and a temperature on held-out bytes, by minimising the composed CE.

    The held-out bytes must be neither trained on nor reported on. Blocks are left out, those with
    the smallest weight first, as long as that costs less than `spare_nats`: the log-probabilities
    of fewer blocks make a sweep over hosts smaller.
    """
    each = [lp for lp in model.block_log_probs(inputs) if lp is not None]
    stacked, y = torch.stack(each).flatten(1, 2), targets.flatten()
    present = [w for w, b in zip(model.weights, model.blocks, strict=True) if b is not None]
    given = torch.tensor(present, device=stacked.device) / sum(present) / model.temperature
    fitted = _fit(stacked, y)
    best = _composed_ce(fitted, stacked, y)
    if not best < _composed_ce(given, stacked, y):  # a fit that was cut off may be worse
        return model
    while spare_nats > 0 and int((fitted > 0).sum()) > 1:
        rest = fitted.clone()
        rest[torch.where(fitted > 0, fitted, torch.inf).argmin()] = 0.0
        kept = rest > 0
        rest[kept] = _fit(stacked[kept], y)
        if not _composed_ce(rest, stacked, y) < best + spare_nats:
            break
        fitted = rest
    total = float(fitted.sum())
    shares = iter((fitted / total).tolist())
    weights = tuple(0.0 if b is None else next(shares) for b in model.blocks)
    return replace(model, weights=weights, temperature=1.0 / total)


def _composed_ce(a: Tensor, stacked: Tensor, y: Tensor) -> float:
    return float(F.cross_entropy(torch.einsum("b,bnv->nv", a, stacked), y))


def _fit(stacked: Tensor, y: Tensor, steps: int = 60) -> Tensor:
    """Fit a = weights / temperature. The CE of softmax(sum_b a_b lp_b) is convex in a, so the start
    does not matter.

    The optimizer moves log a, since a itself, clamped at 0, would have no gradient there. Its line
    search needs the mean to more digits than float32 has, or it stops early.
    """
    precise = torch.float32 if stacked.device.type == "mps" else torch.float64  # not on MPS
    log_a = torch.full((len(stacked),), -math.log(len(stacked)), dtype=precise)
    log_a = log_a.to(stacked.device).requires_grad_()
    optimizer = torch.optim.LBFGS([log_a], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = torch.einsum("b,bnv->nv", log_a.clamp_min(-20.0).exp().to(stacked.dtype), stacked)
        loss = F.cross_entropy(logits, y, reduction="none").to(precise).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return log_a.detach().clamp_min(-20.0).exp().to(stacked.dtype)
