"""The first deadline: how long a round collects updates before it votes, from past arrival times.

Two corrections to "median + k * MAD of what arrived in time":
- Late updates count with their true time, and updates that never came with the time at which the
  round gave up on them. Otherwise the deadline only sees fast updates and keeps shrinking.
- Replicas measure different times, and one that votes seconds before another decides without it. So
  each announces a proposal, and all use the upper median of the last round's proposals, which is
  nearly the same everywhere; the voting window covers the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class DeadlineRules:
    """median + spread_factor * MAD (at least 10 % of the median), between floor and ceiling."""

    floor_s: float
    ceiling_s: float
    spread_factor: float = 4.0
    history: int = 64


def proposal_s(arrivals_s: Sequence[float], rules: DeadlineRules) -> float:
    """A replica's proposal; without past arrivals the ceiling."""
    if not arrivals_s:
        return rules.ceiling_s
    middle = median(arrivals_s)
    spread = median([abs(arrival - middle) for arrival in arrivals_s])
    wanted = middle + rules.spread_factor * max(spread, 0.1 * middle)
    return min(max(wanted, rules.floor_s), rules.ceiling_s)


def agreed_s(proposals_s: Sequence[float], rules: DeadlineRules) -> float:
    """The deadline of a round: the upper median of the proposals, within the limits."""
    if not proposals_s:
        return rules.ceiling_s
    middle = sorted(proposals_s)[len(proposals_s) // 2]
    return min(max(middle, rules.floor_s), rules.ceiling_s)


def remembered(
    history_s: tuple[float, ...], arrivals_s: Sequence[float], rules: DeadlineRules
) -> tuple[float, ...]:
    """The history with the arrivals of one more round, cut to `rules.history`."""
    return (*history_s, *arrivals_s)[-rules.history :]
