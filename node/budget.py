"""A host's budget of bytes per day: how much of it the last 24 hours took.

Decides one thing, whether the host may exchange now. Knows nothing of what the bytes were for; the
ledger counts them. Known limit: it starts anew with the process.
"""

from __future__ import annotations

from collections import deque

DAY_S = 86400.0
SPAN_S = 900.0  # the day is forgotten in pieces of this length


class DailyBudget:
    """`limit_bytes` None: no limit."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self._totals: deque[tuple[float, int]] = deque()  # (when a span began, bytes until then)

    def over(self, now_s: float, total_bytes: int) -> bool:
        """Whether the last day is over the limit; `total_bytes` were moved since the start."""
        if self.limit_bytes is None:
            return False
        if not self._totals or now_s - self._totals[-1][0] >= SPAN_S:
            self._totals.append((now_s, total_bytes))
        while len(self._totals) > 1 and self._totals[1][0] <= now_s - DAY_S:
            self._totals.popleft()
        return total_bytes - self._totals[0][1] > self.limit_bytes
