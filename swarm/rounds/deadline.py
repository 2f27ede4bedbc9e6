"""The first deadline: how long a round collects updates before it votes.

Decides one number from past arrivals. Knows nothing of clocks or peers.

Two corrections to the obvious "median + k * MAD of what arrived in time":
- Late arrivals count with their true time and updates that never came with the time at which the
  round gave up on them. Otherwise the deadline sees only what was fast enough and shrinks for ever.
- Each replica measures other times, and a replica that votes seconds before another one decides
  without it. So each announces its proposal and all use the (upper) median of the proposals of the
  round before, which is nearly the same number everywhere; the voting window covers the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class DeadlineRules:
    """Between floor and ceiling: median + spread_factor * MAD (of at least 10 % of the median)."""

    floor_s: float
    ceiling_s: float
    spread_factor: float = 4.0
    history: int = 64


def proposal_s(arrivals_s: Sequence[float], rules: DeadlineRules) -> float:
    """What one replica proposes. With no past it proposes the ceiling: patience is cheap."""
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
    """The past with one more round in it, cut to its length."""
    return (*history_s, *arrivals_s)[-rules.history :]
