"""The run: a model, its noise, its objective and its schedule, checked once and frozen.

Combinations that make no sense are refused with the field's name. `to_dict` and `from_dict` are for
manifests; the TOML file is `swarm.runfile`'s.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

from protocol.errors import UsageError
from swarm.tables import from_table

Objective = Literal["bayes", "edm", "plain"]
Coupling = Literal["independent", "relay", "look_ahead"]
Composition = Literal["logit", "embedding"]
Optimizer = Literal["muon", "adamw"]

VOCABULARY = 256  # bytes in, bytes out
# Joint denoising goes from nothing known to certain bytes: over all sigmas at which z tells
# something, but not everything, of a byte.
JOINT_SIGMA_MIN, JOINT_SIGMA_MAX = 0.1, 10.0

# Bounds on what another peer's run file can make a host allocate.
MAX_BLOCKS, MAX_LAYERS, MAX_WIDTH, MAX_CONTEXT = 1024, 256, 32768, 1 << 17


@dataclass(frozen=True)
class ModelShape:
    """`blocks` self-contained blocks of `layers` causal Transformer layers each."""

    blocks: int = 4
    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 128
    coupling: Coupling = "look_ahead"

    def __post_init__(self) -> None:
        _within("blocks", self.blocks, 1, MAX_BLOCKS)
        _within("layers", self.layers, 1, MAX_LAYERS)
        _within("width", self.width, 8, MAX_WIDTH)
        _within("context", self.context, 2, MAX_CONTEXT)
        _within("heads", self.heads, 1, self.width)
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise UsageError(
                f"width {self.width} does not split into {self.heads} heads of even size",
                f"choose a width that is a multiple of {2 * self.heads}",
            )

    @property
    def relays(self) -> bool:
        """Whether a block reads the hidden state of the blocks before it."""
        return self.coupling != "independent"


@dataclass(frozen=True)
class Noise:
    """z = E[y] + sigma * eps, with lognormal sigma truncated to [sigma_min, sigma_max]."""

    sigma_min: float = 5.0
    sigma_max: float = 10.0
    p_mean: float = -1.2
    p_std: float = 1.2
    overlap: float = 0.05  # of a block's interval with its neighbours', as a share of its log width
    leak_limit_nats: float = 0.05

    def __post_init__(self) -> None:
        for name in ("sigma_min", "sigma_max", "p_std", "leak_limit_nats"):
            _finite(name, getattr(self, name), low=0.0)
        _finite("p_mean", self.p_mean)
        _finite("overlap", self.overlap, low=-1e-12, high=1.0)
        if self.sigma_min >= self.sigma_max:
            raise UsageError(
                f"sigma_min {self.sigma_min:g} is not below sigma_max {self.sigma_max:g}",
                "give a range such as --sigma-min 5 --sigma-max 10",
            )
        if self.probability(self.sigma_max) - self.probability(self.sigma_min) < 1e-9:
            raise UsageError(
                f"sigma in [{self.sigma_min:g}, {self.sigma_max:g}] has almost no probability "
                f"under the lognormal with p_mean {self.p_mean:g}, p_std {self.p_std:g}",
                "choose a wider range, or one nearer to exp(p_mean)",
            )

    def probability(self, sigma: float) -> float:
        """The lognormal's CDF."""
        return NormalDist().cdf((math.log(sigma) - self.p_mean) / self.p_std)

    def quantile(self, probability: float) -> float:
        """The inverse of `probability`."""
        return math.exp(self.p_mean + self.p_std * NormalDist().inv_cdf(probability))


def usual_learning_rate(steps: int) -> float:
    """The best learning rate of those tried at the default shape; higher for short runs."""
    return 2e-3 if steps < 6000 else 1e-3


@dataclass(frozen=True)
class Training:
    """The objective and the schedule, which depends on the step alone."""

    objective: Objective = "bayes"
    steps: int = 6000
    steps_per_round: int = 50  # copies of other blocks are refreshed once a round
    batch: int = 8
    learning_rate: float = 1e-3
    final_learning_rate: float = 0.02  # as a share of learning_rate
    optimizer: Optimizer = "muon"  # of the matrices inside layers; the rest has AdamW
    warmup_steps: int = 40
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.97
    clip_norm: float = 1.0
    look_ahead_weight: float = 1.0  # weight of the next block's loss in a block's own objective
    staggered: bool = True  # copies in the versions they were trained with, not the newest
    copy_steps: float = 25.0  # copies move 1 / copy_steps of the way to a new version in each step
    ahead_learns: bool = False  # the copy of the next block also follows its own gradient
    denoise_share: float = 0.0  # share of a batch that trains the mode `denoise`
    replica_power: float = 0.0  # R replicas of a block train at R ** this times the learning rate

    def __post_init__(self) -> None:
        _within("steps", self.steps, 1, 10**9)
        _within("steps_per_round", self.steps_per_round, 1, 10**6)
        _within("batch", self.batch, 1, 1 << 16)
        _within("warmup_steps", self.warmup_steps, 0, 10**9)
        _finite("learning_rate", self.learning_rate, low=0.0, high=10.0)
        _finite("clip_norm", self.clip_norm, low=0.0)
        _finite("weight_decay", self.weight_decay, low=-1e-12, high=1.0)
        _finite("look_ahead_weight", self.look_ahead_weight, low=-1e-12, high=1e3)
        _finite("final_learning_rate", self.final_learning_rate, low=-1e-12, high=1.0)
        for name in ("beta1", "beta2"):
            _finite(name, getattr(self, name), low=-1e-12, high=0.99999)
        _finite("copy_steps", self.copy_steps, low=1.0 - 1e-12, high=1e6)
        _finite("denoise_share", self.denoise_share, low=-1e-12, high=0.9)
        _finite("replica_power", self.replica_power, low=-1e-12, high=1.0)
        if self.denoise_share > 0 and self.batch < 2:
            raise UsageError(
                "denoise_share takes a part of every batch, and a batch of 1 has no part to give",
                "raise the batch to 2 or more, or set denoise_share to 0",
            )

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine to `final_learning_rate` of the peak."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        phase = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / self.steps)))
        floor = self.final_learning_rate
        return self.learning_rate * warm * (floor + (1.0 - floor) * phase)

    def rate_factor(self, replicas: float) -> float:
        """The factor on the learning rate with several replicas of a block; see `replica_power`.

        The mean of several noisy steps is shorter than each of them, and less noisy.
        """
        return float(max(1.0, replicas) ** self.replica_power)

    @property
    def denoise_rows(self) -> int:
        """Rows of a batch that train joint denoising; at least one is left for the objective."""
        return min(math.ceil(max(0.0, self.denoise_share) * self.batch), self.batch - 1)


@dataclass(frozen=True)
class Run:
    """Everything that must be equal on every host of a run."""

    model: ModelShape = field(default_factory=ModelShape)
    noise: Noise = field(default_factory=Noise)
    training: Training = field(default_factory=Training)
    seed: int = 0

    def __post_init__(self) -> None:
        _within("seed", self.seed, 0, 2**32 - 1)  # torch's generators read 32 bits of a seed
        if self.training.objective == "edm" and self.model.relays:
            raise UsageError(
                "the edm objective has z as an input and works with independent blocks only",
                "use --coupling independent, or --objective bayes",
            )
        if self.denoises:
            if self.training.objective == "edm":
                raise UsageError(
                    "joint denoising needs a head over bytes, which the edm objective has not",
                    "use --objective bayes, or set denoise_share to 0",
                )
            self.joint_noise()  # refuses a range that has no probability

    @property
    def denoises(self) -> bool:
        """Whether its blocks train joint denoising."""
        return self.training.denoise_rows > 0

    def joint_noise(self) -> Noise:
        """The sigmas of joint denoising. Without a leak limit, since a sweep starts from noise."""
        return dataclasses.replace(self.noise, sigma_min=JOINT_SIGMA_MIN, sigma_max=JOINT_SIGMA_MAX)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Run:
        """The inverse of `to_dict`, for untrusted input. Raises UsageError."""
        return from_table(cls, raw, "run")


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{name} is {value}; it must be between {low} and {high}")


def _finite(name: str, value: float, low: float = -math.inf, high: float = math.inf) -> None:
    if not (math.isfinite(value) and low < value <= high):
        wanted = "a finite number" + (" above 0" if low == 0.0 else "")
        wanted += f", at most {high:g}" if math.isfinite(high) else ""
        raise UsageError(f"{name} is {value}; it must be {wanted}")
