"""Rounds and update densities of a run, from its length and its hosts' speed.

For the presets and `blockswarm init`; a run file may have any others. The numbers come from the
trials in docs/trials.md; `benchmarks.worth` measures the presets:

- Replicas that drift far apart between two exchanges lose the gain of averaging. Drift is learning
  rate times steps: with 4 replicas 0.04 kept all of a cluster's gain, 0.08 kept 0.85 of it and 0.2
  half.
- The loss from sparse updates depends on coverage: how often each weight is sent in the whole run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.run import Training

REPLICAS = 4  # replicas of a block that plans are made for
DRIFT = 0.04  # learning rate (with REPLICAS replicas) times the steps of a round
COVERAGE = 40.0  # without what the denser ends of the run add
ENOUGH_COVERAGE = 15.0  # with the ends
ENDS_DENSITY = 0.5
LEAST_DENSITY, MOST_DENSITY = 0.0005, 0.2
LEAST_PERIOD_S = 1.5  # enough for an exchange among processes of one machine
# Windows of an exchange as shares of a period: first deadline (floor, ceiling), vote, repair.
FLOOR, CEILING, VOTE, REPAIR = 0.1, 0.35, 0.1, 0.12


@dataclass(frozen=True)
class Plan:
    """The rounds of a run and the density of its updates."""

    steps_per_round: int
    period_s: float
    count: int
    density: float

    @property
    def windows_s(self) -> tuple[float, float, float, float]:
        """The first deadline's floor and ceiling, the windows of votes and repair."""
        return (
            round(FLOOR * self.period_s, 2),
            round(CEILING * self.period_s, 2),
            round(VOTE * self.period_s, 2),
            round(REPAIR * self.period_s, 2),
        )


def plan(training: Training, duration_s: float, steps_per_s: float) -> Plan:
    """The plan for a run of this length, with hosts of this speed.

    Rounds are as short as DRIFT demands, but not shorter than an exchange takes: fast hosts then
    make more steps in a round.
    """
    rate = training.learning_rate * training.rate_factor(REPLICAS)
    steps = max(1, round(DRIFT / rate))
    period_s = steps / steps_per_s
    if period_s < LEAST_PERIOD_S:
        period_s = LEAST_PERIOD_S
        steps = max(1, math.floor(period_s * steps_per_s))
    count = max(1, round(duration_s / period_s))
    density = min(max(COVERAGE / count, LEAST_DENSITY), MOST_DENSITY)
    return Plan(steps, round(period_s, 2), count, density)
