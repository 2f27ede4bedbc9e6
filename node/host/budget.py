"""A host's budget of bytes per day: how much of it the last 24 hours took.

Decides one thing, whether the host may exchange now. Knows nothing of what the bytes were for; the
ledger counts them, over restarts, and the day is kept beside it: a host that is started again ten
times a day has one budget, not ten.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec

DAY_S = 86400.0
SPAN_S = 900.0  # the day is forgotten in pieces of this length
FILE = "budget.json"
_MAX_BYTES = 65536
_MAX_SPANS = int(DAY_S / SPAN_S) + 2


class DailyBudget:
    """`limit_bytes` None: no limit. `now_s` is wall time, `total_bytes` all that was ever moved."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self._totals: deque[tuple[float, int]] = deque()  # (when a span began, bytes until then)

    def left_bytes(self, now_s: float, total_bytes: int) -> int | None:
        """What may still be moved today; below 0 if it was too much. None: no limit."""
        if self.limit_bytes is None:
            return None
        if self._totals and (self._totals[-1][0] > now_s or self._totals[-1][1] > total_bytes):
            self._mend(now_s, total_bytes)
        if not self._totals or now_s - self._totals[-1][0] >= SPAN_S:
            self._totals.append((now_s, total_bytes))
        while len(self._totals) > 1 and self._totals[1][0] <= now_s - DAY_S:
            self._totals.popleft()
        return self.limit_bytes - (total_bytes - self._totals[0][1])

    def over(self, now_s: float, total_bytes: int) -> bool:
        """Whether the last day is over the limit."""
        left = self.left_bytes(now_s, total_bytes)
        return left is not None and left < 0

    def _mend(self, now_s: float, total_bytes: int) -> None:
        """The clock was set back, or the ledger was lost: what was used today stays used."""
        back_s = max(0.0, self._totals[-1][0] - now_s)
        lost = max(0, self._totals[-1][1] - total_bytes)
        self._totals = deque((when - back_s, until - lost) for when, until in self._totals)

    # Surviving a restart.

    def to_bytes(self) -> bytes | None:
        """What is to be kept in `FILE`: nothing without a limit."""
        if self.limit_bytes is None:
            return None
        return msgspec.json.encode(list(self._totals))

    def load(self, folder: Path) -> None:
        """What cannot be read is not there: then the day begins now."""
        try:
            with open(folder / FILE, "rb") as file:
                found = msgspec.json.decode(file.read(_MAX_BYTES), type=list[tuple[float, int]])
        except (OSError, msgspec.DecodeError):
            return
        if found == sorted(found) and all(0 <= when < 1e12 for when, _ in found):
            self._totals = deque(found[-_MAX_SPANS:])
