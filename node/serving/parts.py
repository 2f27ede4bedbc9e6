"""Sweeps that come in parts: what a host keeps of each between one part and the next.

Parts are taken in order and within a memory limit; at the last host their results are joined.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from node.serving.compute import Session
from node.serving.handover import Line
from node.serving.sessions import SESSIONS_MAX, SESSIONS_MAX_BYTES, Key, session_bytes
from protocol.parcel import Outcome
from protocol.serving import Sweep
from swarm.learning.model import LayerCache
from swarm.run import Run


@dataclass(eq=False)
class Begun:
    """One sweep in parts: the block's caches of its drafts so far; at the last host its results."""

    session: Session = field(default_factory=lambda: Session([]))
    size_bytes: int = 0
    end_s: float = 0.0
    line: Line = field(default_factory=Line)
    taken: int = 0  # parts
    computed: int = 0
    results: list[Outcome] = field(default_factory=list)

    def result(self) -> Outcome:
        """The results of all parts joined."""
        drafted, scores = zip(*((each.drafted, each.scores) for each in self.results), strict=True)
        return Outcome(
            np.concatenate([each.drafts for each in self.results], 1),
            np.sum(drafted, 0),
            np.concatenate(scores, 1),
        )


class PartsUnderWay:
    """All sweeps of which some parts have arrived, by key. Late ones are dropped."""

    def __init__(self, run: Run) -> None:
        self._row_bytes, self._layers = session_bytes(run), run.model.layers
        self._begun: dict[Key, Begun] = {}

    def __len__(self) -> int:
        return len(self._begun)

    def room(self, sweep: Sweep) -> bool:
        self.forget_late()
        held = sum(begun.size_bytes for begun in self._begun.values())
        fits = held + sweep.drafts * self._row_bytes <= SESSIONS_MAX_BYTES
        return len(self._begun) < SESSIONS_MAX and fits

    def expects(self, key: Key, part: int) -> bool:
        """Whether this part comes next. Part 0 always does: it starts the sweep anew."""
        begun = self._begun.get(key)
        return part == 0 or (begun is not None and begun.taken == part)

    def take(self, key: Key, sweep: Sweep, end_s: float) -> Begun:
        """Register the arrival of a part; after the last one the entry is removed."""
        if sweep.part == 0:
            cache = [LayerCache() for _ in range(self._layers)]
            self._begun[key] = Begun(Session(cache), sweep.drafts * self._row_bytes, end_s)
        begun = self._begun[key]
        begun.taken += 1
        if begun.taken == sweep.parts:
            del self._begun[key]
        return begun

    def forget_late(self) -> None:
        now_s = time.monotonic()
        for key in [k for k, begun in self._begun.items() if begun.end_s < now_s]:
            del self._begun[key]
