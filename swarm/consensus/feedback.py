"""Error feedback of a sender: what it has learned and the consensus does not contain yet.

Decides the arithmetic of one ledger. Knows nothing of rounds, peers or compression.

The ledger is one identity, true at every moment on every replica:

    running weights + aside = consensus + unsent

where `unsent` is everything that this replica learned and that is in no consensus of its chain.
An update is a part of `unsent`. While its fate is unknown it is in flight and is not sent again;
if the round included it, the consensus grows and `unsent` shrinks by the part that went in;
if the round left it out, nothing has to be done: it never left `unsent`. So no update can be
counted twice or lost, whatever happened in between: `unsent` is measured, not booked.

What compression left out can be held in two ways, and both obey the identity:
- carried: the running weights keep it, and a replica goes on from its own best weights;
- aside: the running weights go back to the consensus, from which all replicas go on together (the
  classic form of error feedback).
Carried alone, replicas drift apart in all that they could not send yet, and gradients at places so
far from each other average badly; aside alone, each learns again what waits to be sent. So a part
is carried, 1 / sqrt(replicas) of it, and the rest is put aside after every update (`set_aside`). A
host that is alone carries all. docs/trials.md has the trials.
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

ASIDE_LIMIT = 60_000.0  # what half precision holds


def aside_share(replicas: float) -> float:
    """How much of what was not sent is put aside, among so many replicas."""
    return float(1.0 - max(1.0, replicas) ** -0.5)


@dataclass(frozen=True, eq=False)
class Unsent:
    """What is unsent, as weights, made while it is read: what a host compresses.

    No vector of it is ever in memory, and it costs a tenth of one that is. Rounded to fp32, as the
    weights are. Only the sender ever sees it: an update is what its bytes decode to, and what it
    does not say is measured again in the next round.
    """

    weights: Floats
    consensus: Quanta
    in_flight: Sequence[FixedUpdate] = ()
    aside: Halves | None = None
    factor: float = 1.0  # of all of it

    @property
    def size(self) -> int:
        return len(self.weights)

    def times(self, factor: float) -> Unsent:
        return replace(self, factor=self.factor * factor)

    def dense(self) -> Floats:
        return self.read(0, np.empty(self.size, dtype=np.float32))

    def read(self, start: int, out: Floats) -> Floats:
        """The coordinates from `start` on, as many as `out` has, in `out`."""
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
    """After an update: what is aside from now on, and what it changes in the running weights.

    `rest` is what `sent` was made of. In half precision; what that rounds away stays in the running
    weights, so nothing is lost. None, None: nothing was aside, and nothing is.
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
    """Subtract from the coordinates of a vector that begin at `start`."""
    here = slice(start, start + len(out))
    at: slice | Whole = slice(None)
    if update.indices is not None:
        ends = np.array([here.start, here.stop], dtype=update.indices.dtype)  # else all are cast
        here = slice(*np.searchsorted(update.indices, ends))
        at = update.indices[here] - start
    out[at] -= (update.values[here] * 2.0**-QUANTUM_BITS).astype(np.float32)


def only_ours(ours: Ints, theirs: Ints) -> Ints:
    """Of the way that our branch went since the fork, what the other branch did not go as well.

    Where both went the same way only what we went further counts; where they stood still or went
    back, all of it. So nothing that both learned is done twice, and nothing of theirs is undone
    for having been learned by them alone.
    """
    common = np.where(np.sign(ours) == np.sign(theirs), np.minimum(np.abs(ours), np.abs(theirs)), 0)
    result: Ints = ours - np.sign(ours) * common
    return result
