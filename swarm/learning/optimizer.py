"""The optimizer: Muon for the matrices inside layers, AdamW for the rest.

The same for blocks and for the end-to-end reference. The learning rate is given with each step.

Muon takes the momentum of a matrix's gradient and makes all its singular values about one: where
AdamW follows the few directions that all gradients share, Muon learns in all directions, with half
of AdamW's state (one buffer instead of two). Embeddings and heads have one row per byte, and norms
are vectors: there AdamW's step per number fits.

AdamW calls torch's fused kernel, not `torch.optim`, whose first step imports torch's compiler: two
seconds and 70 MB for every training process.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
TOGETHER = 1 << 20  # numbers orthogonalised at once: small matrices in batches, large ones alone
EPSILON = 1e-8  # of AdamW


@dataclass(frozen=True)
class Group:
    """Weights with the same options. `parts`: how many matrices are stacked in each weight."""

    weights: tuple[Tensor, ...]
    weight_decay: float
    parts: int = 1

    @property
    def trained(self) -> list[tuple[Tensor, Tensor]]:
        """The weights that have a gradient, each with it."""
        return [(weight, weight.grad) for weight in self.weights if weight.grad is not None]


class Rule(ABC):
    """An optimizer for groups of weights. `remembers`: the names of its state for each weight."""

    remembers: tuple[str, ...] = ()

    def __init__(self, groups: Iterable[Group]) -> None:
        self.groups = tuple(group for group in groups if group.weights)
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @abstractmethod
    def step(self, learning_rate: float) -> None:
        """Move every weight that has a gradient."""


class AdamW(Rule):
    remembers = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, groups: Iterable[Group], beta1: float, beta2: float) -> None:
        super().__init__(groups)
        self.beta1, self.beta2 = beta1, beta2

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for group in self.groups:
            if not group.trained:
                continue
            weights, gradients = zip(*group.trained, strict=True)
            states = [self._state(weight) for weight in weights]
            torch._foreach_add_([state["step"] for state in states], 1.0)
            torch._fused_adamw_(
                weights,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                lr=learning_rate,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=group.weight_decay,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
            )

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        if weight not in self.state:
            self.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
        return self.state[weight]


class Muon(Rule):
    """Muon: steps along the orthogonalised momentum."""

    remembers = ("momentum",)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One step of every matrix that has a gradient."""
        for group in self.groups:
            for weight, _ in group.trained:
                weight.mul_(1.0 - learning_rate * group.weight_decay)
        _follow(
            (
                (weight, self._direction(weight, gradient), group.parts)
                for group in self.groups
                for weight, gradient in group.trained
            ),
            learning_rate,
        )

    def _direction(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Nesterov momentum, written into the gradient's memory.

        The gradient is not read after this, and with another buffer the optimizer's step would be
        the peak of a worker's memory.
        """
        if weight not in self.state:
            self.state[weight] = {"momentum": torch.zeros_like(weight)}
        momentum = self.state[weight]["momentum"]
        momentum.lerp_(gradient, 1.0 - MOMENTUM)
        return gradient.lerp_(momentum, MOMENTUM)


def _follow(directions: Iterable[tuple[Tensor, Tensor, int]], learning_rate: float) -> None:
    """Orthogonalise directions and move weights along them. Items: weight, direction, parts."""
    alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    for weight, direction, parts in directions:
        for place, way in zip(weight.chunk(parts), direction.chunk(parts), strict=True):
            pair = (place.mT, way.mT) if place.shape[0] > place.shape[1] else (place, way)
            alike.setdefault(tuple(pair[0].shape), []).append(pair)
    for shape, found in alike.items():
        size = max(1, TOGETHER // math.prod(shape))
        for start in range(0, len(found), size):
            _move(found[start : start + size], -learning_rate * STEP_RMS * max(shape) ** 0.5)


def _move(found: Sequence[tuple[Tensor, Tensor]], scale: float) -> None:
    ways = orthogonalised(torch.stack([direction for _, direction in found]))
    for (place, _), way in zip(found, ways, strict=True):
        place.add_(way.to(place.dtype), alpha=scale)


def orthogonalised(x: Tensor) -> Tensor:
    """Matrices (batch, rows, columns), rows <= columns, with all singular values made about one."""
    if x.device.type == "cuda":
        x = x.bfloat16()  # precise enough for a direction; on a CPU it seldom pays
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True) + 1e-7).to(x.dtype)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


class PassingSteps:
    """Orthogonalised gradient steps without momentum, for a copy of another block: no optimizer
    state. Moves only the matrices inside layers."""

    def __init__(self, module: nn.Module) -> None:
        named = [(weight, _parts(name)[1]) for name, weight in module.named_parameters()]
        self.matrices = [(weight, parts) for weight, parts in named if parts]

    def want_gradients(self, wanted: bool) -> None:
        for weight, _ in self.matrices:
            weight.requires_grad_(wanted)
            weight.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        held = [(weight, weight.grad, parts) for weight, parts in self.matrices]
        _follow([(w, g, parts) for w, g, parts in held if g is not None], learning_rate)


class BlockOptimizer:
    """The optimizer of a block, or of the whole reference."""

    def __init__(self, training: Training, module: nn.Module) -> None:
        self.named = dict(module.named_parameters())
        split = {name: parts for name, parts in map(_parts, self.named) if parts}
        if training.optimizer == "adamw":
            split = {}
        rest = [p for name, p in self.named.items() if name not in split]
        self.learning_rate = training.learning_rate  # of the last step
        decay = training.weight_decay
        tables = Group(tuple(p for p in rest if p.ndim >= 2), decay)
        vectors = Group(tuple(p for p in rest if p.ndim < 2), 0.0)
        self.rules: list[Rule] = [AdamW((tables, vectors), training.beta1, training.beta2)]
        if split:
            alike: dict[int, list[Tensor]] = {}
            for name, parts in split.items():
                alike.setdefault(parts, []).append(self.named[name])
            self.rules.append(Muon(Group(tuple(found), decay, n) for n, found in alike.items()))

    def zero_grad(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def step(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        for rule in self.rules:
            rule.step(learning_rate)

    def tensors(self) -> dict[str, Tensor]:
        """All state by parameter name, to be saved without pickle."""
        return {
            f"{name}:{key}": value
            for name, parameter in self.named.items()
            for rule in self.rules
            for key, value in rule.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`. Weights that were never stepped have no state."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.named.items()}
        for rule in self.rules:
            rule.state.clear()
            for weight in (weight for group in rule.groups for weight in group.weights):
                name, keys = names[weight], rule.remembers
                if any(f"{name}:{key}" in tensors for key in keys):
                    rule.state[weight] = _state_of(name, weight, tensors, keys)


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
    """The name, and how many matrices Muon sees in the parameter: three in qkv, 0: not Muon's."""
    if name.endswith("qkv.weight"):
        return name, 3
    inner = ("attention_out.weight", "up.weight", "down.weight", "relay_in.weight")
    return name, int(name.endswith(inner))
