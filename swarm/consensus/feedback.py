"""Error feedback of a sender: what it has learned and the consensus does not contain yet.

One identity holds at every moment on every replica:

    running weights + aside = consensus + unsent

`unsent` is everything that this replica has learned and that is in no consensus of its chain. An
update is a part of `unsent`. Until its round is decided it is in flight and not sent again. If the
round includes it, the consensus grows and `unsent` shrinks by the included part; if not, nothing
has to be done, since it never left `unsent`. Because `unsent` is computed from the weights and not
kept as a buffer, no update can be counted twice or lost.

What compression left out is held in one of two ways:
- carried: it stays in the running weights, and a replica goes on from its own best weights;
- aside: the running weights go back to the consensus, the classic form of error feedback.
If all is carried, replicas drift apart by what they could not send yet, and their gradients average
badly; if all is aside, each learns again what waits to be sent. So 1 / sqrt(replicas) is carried,
and the rest is put aside after every update (`set_aside`). A host that is alone carries all.
docs/trials.md has the trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from swarm.consensus.fixed_point import (
    QUANTUM_BITS,
    SEGMENT,
    FixedUpdate,
    Halves,
    Ints,
    Quanta,
    Whole,
)

Floats = npt.NDArray[np.float32]

ASIDE_LIMIT = 60_000.0  # near the largest value of half precision


def aside_share(replicas: float) -> float:
    """The share of what was not sent that is put aside, for a number of replicas."""
    return float(1.0 - max(1.0, replicas) ** -0.5)


@dataclass(frozen=True, eq=False)
class Unsent:
    """What is unsent, as weights, made while it is read: what a host compresses.

    It is never in memory as a whole, and takes a tenth of the time. Rounding to fp32 does no harm:
    an update is what its bytes decode to, and the rest is measured again in the next round.
    """

    weights: Floats
    consensus: Quanta
    in_flight: Sequence[FixedUpdate] = ()
    aside: Halves | None = None
    factor: float = 1.0  # on all coordinates

    @property
    def size(self) -> int:
        return len(self.weights)

    def times(self, factor: float) -> Unsent:
        return replace(self, factor=self.factor * factor)

    def dense(self) -> Floats:
        return self.read(0, np.empty(self.size, dtype=np.float32))

    def read(self, start: int, out: Floats) -> Floats:
        """Write `out.size` coordinates from `start` on to `out`."""
        unit = np.float32(2.0**-QUANTUM_BITS)
        for at in range(0, len(out), SEGMENT):
            part = out[at : at + SEGMENT]
            here = slice(start + at, start + at + len(part))
            np.copyto(part, self.consensus[here], casting="unsafe")
            part *= unit
            np.subtract(self.weights[here], part, out=part)
            if self.aside is not None:
                part += self.aside[here]
        for update in self.in_flight:
            _take_out(update, start, out)
        if self.factor != 1.0:
            out *= np.float32(self.factor)
        return out


def set_aside(rest: Unsent, sent: FixedUpdate, share: float) -> tuple[Halves | None, Floats | None]:
    """After an update: the new `aside`, and the change to the running weights.

    `rest` is the vector that `sent` was compressed from. What half precision rounds away stays in
    the running weights, so nothing is lost. (None, None) if nothing was or is put aside.
    """
    if not share and rest.aside is None:
        return None, None
    kept = np.zeros(rest.size, dtype=np.float16)
    change = np.empty(rest.size, dtype=np.float32)
    for start in range(0, rest.size if share else 0, SEGMENT):
        part = rest.read(start, np.empty(min(SEGMENT, rest.size - start), dtype=np.float32))
        _take_out(sent, start, part)
        part *= np.float32(share)
        np.clip(part, -ASIDE_LIMIT, ASIDE_LIMIT, out=part)
        kept[start : start + len(part)] = part
    np.negative(kept, out=change, dtype=np.float32)
    if rest.aside is not None:
        change += rest.aside
    return (kept if share else None), change


def _take_out(update: FixedUpdate, start: int, out: Floats) -> None:
    """Subtract an update from `out`, the coordinates of a vector from `start` on."""
    here = slice(start, start + len(out))
    at: slice | Whole = slice(None)
    if update.indices is not None:
        ends = np.array([here.start, here.stop], dtype=update.indices.dtype)  # else all are cast
        here = slice(*np.searchsorted(update.indices, ends))
        at = update.indices[here] - start
    out[at] -= (update.values[here] * 2.0**-QUANTUM_BITS).astype(np.float32)


def only_ours(ours: Ints, theirs: Ints) -> Ints:
    """The part of our branch's change since the fork that the other branch did not make as well.

    Per coordinate: where both moved in the same direction, only our excess; where the other branch
    did not move or moved back, all of ours. So nothing that both learned is applied twice, and
    nothing that only they learned is undone.
    """
    common = np.where(np.sign(ours) == np.sign(theirs), np.minimum(np.abs(ours), np.abs(theirs)), 0)
    result: Ints = ours - np.sign(ours) * common
    return result
