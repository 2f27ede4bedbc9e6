"""How dense the updates of each exchange of a run are: denser near both ends.

What a sparse update leaves out waits for a later one, and how long it may wait depends on where in
the run it waits. In the first exchanges everything that was learned is new; after the last nothing
comes any more. So the n-th exchange from either end sends at least `ends_density / n` of all
weights: whatever was learned is sent within the run's own age, and before the run is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from protocol.codec import CodecId, CodecSpec


@dataclass(frozen=True)
class CodecSchedule:
    """The codec of every exchange. Exchanges are numbered from 1 to `count`, as rounds are."""

    base: CodecSpec
    count: int = 0  # 0: no end is known, and no exchange is near one
    ends_density: float = 0.0

    @classmethod
    def always(cls, codec: CodecSpec | str) -> CodecSchedule:
        """The same codec in every exchange."""
        return cls(CodecSpec.parse(codec) if isinstance(codec, str) else codec)

    def at(self, number: int) -> CodecSpec:
        if self.base.codec != CodecId.TOPK or not self.count:
            return self.base
        from_an_end = max(1, min(number, self.count + 1 - number))
        density = min(1.0, max(self.base.density, self.ends_density / from_an_end))
        return replace(self.base, density=density)

    @property
    def sparse(self) -> bool:
        """Whether an update leaves out more than the rounding of what it sends."""
        return self.base.codec == CodecId.TOPK

    @property
    def densest(self) -> CodecSpec:
        return self.at(1)

    def mean(self, of: Callable[[CodecSpec], float]) -> float:
        """The mean of something over all exchanges; those far from both ends are alike."""
        if not self.count or not self.ends_density:
            return of(self.base)
        near = min(self.count // 2, math.ceil(self.ends_density / self.base.density))
        ends = sum(of(self.at(number)) for number in range(1, near + 1))
        between = self.count - 2 * near  # alike, or only one
        middle = between * of(self.at(near + 1)) if between else 0.0
        return (2 * ends + middle) / self.count
