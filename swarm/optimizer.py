"""How weights follow their gradients: Muon for the matrices inside layers, AdamW for the rest.

Decides which weights are moved by which rule, and what of it a checkpoint holds. The same for a
block's worker and for the end-to-end reference, which must not have a worse one. Knows nothing of
losses or schedules: whoever steps sets the learning rate first.

Muon takes the momentum of a matrix's gradient and makes all its singular values about one: where
AdamW follows the few directions that every gradient has in common, this learns in all of them, for
half of AdamW's state (one buffer instead of two). Embeddings and heads are tables of bytes, one row
each, and norms are vectors: there AdamW's step per number is the right one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swarm.run import Training

# Singular values in (0, 1] come to within 0.7 and 1.2 after five steps of x -> ax + bx^3 + cx^5.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MOMENTUM = 0.95
# Root mean square of a step per unit of learning rate. AdamW's is between 0.2 and 1, so that one
# learning rate serves both.
STEP_RMS = 0.6
TOGETHER = (
    1 << 22
)  # numbers that are orthogonalised at once: small matrices in batches, large alone


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised. `parts` is how many square-ish matrices are stacked in each."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], lr: float, weight_decay: float) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "parts": 1}
        super().__init__([dict(group) for group in groups], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody has a closure
        """One step of every matrix that has a gradient."""
        alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor, float]]] = {}
        for weight, parts, group in self._trained():
            weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            pairs = zip(weight.chunk(parts), self._direction(weight).chunk(parts), strict=True)
            for place, direction in pairs:
                if place.shape[0] > place.shape[1]:
                    place, direction = place.mT, direction.mT
                shape = tuple(place.shape)
                alike.setdefault(shape, []).append((place, direction, group["lr"]))
        for shape, found in alike.items():
            size = max(1, TOGETHER // math.prod(shape))
            for start in range(0, len(found), size):
                _move(found[start : start + size], STEP_RMS * math.sqrt(max(shape)))

    def _trained(self) -> Iterator[tuple[Tensor, int, dict[str, Any]]]:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    yield weight, group["parts"], group

    def _direction(self, weight: Tensor) -> Tensor:
        """Nesterov's: the gradient, most of the way towards its momentum."""
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(weight.grad, 1.0 - MOMENTUM)
        assert weight.grad is not None
        return weight.grad.lerp(state["momentum"], MOMENTUM)


def _move(found: Sequence[tuple[Tensor, Tensor, float]], scale: float) -> None:
    ways = orthogonalised(torch.stack([direction for _, direction, _ in found]))
    for (place, _, lr), way in zip(found, ways, strict=True):
        place.add_(way.to(place.dtype), alpha=-lr * scale)


def orthogonalised(x: Tensor) -> Tensor:
    """(batch, rows, columns), rows <= columns: the same with all singular values near one."""
    if x.device.type == "cuda":
        x = x.bfloat16()  # precise enough for a direction; on a CPU it is slower, not faster
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True) + 1e-7).to(x.dtype)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


class BlockOptimizer:
    """The optimizer of a block, or of the whole reference."""

    def __init__(self, training: Training, module: nn.Module) -> None:
        self.named = dict(module.named_parameters())
        split = {name: parts for name, parts in map(_parts, self.named) if parts}
        if training.optimizer == "adamw":
            split = {}
        rest = [p for name, p in self.named.items() if name not in split]
        lr, decay = training.learning_rate, training.weight_decay
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [
                    {"params": [p for p in rest if p.ndim >= 2], "weight_decay": decay},
                    {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
                ],
                lr=lr,
                betas=(training.beta1, training.beta2),
                fused=True,
            )
        ]
        if split:
            groups = [
                {"params": [self.named[n] for n, p in split.items() if p == parts], "parts": parts}
                for parts in sorted(set(split.values()))
            ]
            self.optimizers.append(Muon(groups, lr, decay))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self, learning_rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = learning_rate
        for optimizer in self.optimizers:
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """All state by parameter name: no pickle needed to write it down."""
        out: dict[str, Tensor] = {}
        for name, parameter in self.named.items():
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    out[f"{name}:{key}"] = value
        return out

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`. What was never stepped has no state, neither there nor here."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
            keys = (
                ("momentum",) if isinstance(optimizer, Muon) else ("step", "exp_avg", "exp_avg_sq")
            )
            trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in self.named.items():
                if id(parameter) in trained and any(f"{name}:{key}" in tensors for key in keys):
                    optimizer.state[parameter] = _state_of(name, parameter, tensors, keys)


def _state_of(
    name: str, parameter: Tensor, tensors: Mapping[str, Tensor], keys: Sequence[str]
) -> dict[str, Tensor]:
    found = {key: tensors[f"{name}:{key}"] for key in keys}
    if any(key != "step" and value.shape != parameter.shape for key, value in found.items()):
        raise ValueError(f"the optimizer's state of {name} has another shape")
    return {
        key: value.to(device=parameter.device, dtype=torch.float32, copy=True)
        for key, value in found.items()
    }


def _parts(name: str) -> tuple[str, int]:
    """How many matrices Muon sees in a parameter: queries, keys and values are three."""
    if name.endswith("qkv.weight"):
        return name, 3
    inner = ("attention_out.weight", "up.weight", "down.weight", "relay_in.weight")
    return name, int(name.endswith(inner))
