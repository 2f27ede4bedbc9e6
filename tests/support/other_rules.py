"""Ways to combine updates that the rule of `swarm.consensus.aggregate` is held against."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np

from protocol.limits import WORK_ONE
from swarm.consensus.aggregate import CLIP_X16, clip_scale, lower_median
from swarm.consensus.fixed_point import FixedUpdate, compact, rounded_mean, scaled
from swarm.consensus.sums import mean_step, summed


def mean(updates: Sequence[FixedUpdate]) -> FixedUpdate:
    return mean_step(summed([(update, 1) for update in updates]), WORK_ONE * len(updates))


def clipped(updates: Sequence[FixedUpdate]) -> list[FixedUpdate]:
    """To 1.25 times the median of their norms."""
    norms = [isqrt(update.squared) for update in updates]
    limit = lower_median(norms) * CLIP_X16 // 16
    return [scaled(u, clip_scale(n, limit)) for u, n in zip(updates, norms, strict=True)]


def median(updates: Sequence[FixedUpdate]) -> FixedUpdate:
    """Of every coordinate by itself."""
    stacked = np.sort(np.stack([update.dense() for update in updates]), axis=0)
    low, high = stacked[(len(updates) - 1) // 2], stacked[len(updates) // 2]
    return compact(rounded_mean(low + high, 2))
