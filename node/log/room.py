"""Reuse the array of the previous consensus for the next one.

The system hands out a new array of 100 MB page by page and zeroes each page, which takes twice as
long as writing the weights to it. So two arrays take turns; the older one is reused if nothing else
refers to it.
"""

from __future__ import annotations

import sys

from node.log.fetch import Quanta

OWN_REFERENCES = 2  # while it is asked: a local name, and the argument of `getrefcount`


class Room:
    """Holds the previous version's array. To be called from the event loop's thread only."""

    def __init__(self) -> None:
        self._kept: Quanta | None = None

    def keep(self, weights: Quanta) -> None:
        """Keep an array that the next version is about to replace."""
        self._kept = weights

    def take(self, size: int) -> Quanta | None:
        """Give away the kept array if it has `size` weights and no other references, else None.

        Snapshots, saved states and running readers hold arrays, views or memoryviews, all of which
        count as references (as for `ndarray.resize`). An array without others cannot gain one.
        """
        weights, self._kept = self._kept, None
        if weights is None or len(weights) != size or weights.base is not None:
            return None
        return weights if sys.getrefcount(weights) == OWN_REFERENCES else None
