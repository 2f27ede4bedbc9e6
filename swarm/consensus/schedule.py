"""How dense the updates of each exchange of a run are: denser near both ends.

What a sparse update leaves out is sent in a later exchange. At the start everything that was
learned is new, and after the last exchange nothing more is sent. So the n-th exchange from either
end sends at least `ends_density / n` of all weights: nothing waits for longer than the run has
lasted, or past its end.
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
    count: int = 0  # 0: without a known end, and so always `base`
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
        """Whether updates leave out coordinates (top-k)."""
        return self.base.codec == CodecId.TOPK

    @property
    def densest(self) -> CodecSpec:
        return self.at(1)

    def mean(self, of: Callable[[CodecSpec], float]) -> float:
        """The mean of a function of the codec over all exchanges."""
        if not self.count or not self.ends_density:
            return of(self.base)
        near = min(self.count // 2, math.ceil(self.ends_density / self.base.density))
        ends = sum(of(self.at(number)) for number in range(1, near + 1))
        between = self.count - 2 * near  # all with the same codec, or only one
        middle = between * of(self.at(near + 1)) if between else 0.0
        return (2 * ends + middle) / self.count
