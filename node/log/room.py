"""The version of a consensus before the present one, kept as room for the next one.

A new array of 100 MB comes from the system page by page, each page zeroed: twice the time of
writing the weights to it. So two arrays take turns. Decides when the older one may be written to:
when nobody else holds it. Knows nothing of rounds, nor of what a version is.
"""

from __future__ import annotations

import sys

from node.log.fetch import Quanta

OWN_REFERENCES = 2  # while it is asked: a local name, and the argument of `getrefcount`


class Room:
    """All calls are from the loop's thread."""

    def __init__(self) -> None:
        self._kept: Quanta | None = None

    def keep(self, weights: Quanta) -> None:
        """They are about to be the older version."""
        self._kept = weights

    def take(self, size: int) -> Quanta | None:
        """An array of `size` weights to write to, if there is one that is ours alone; given once.

        A snapshot, a saved moment or a reader that still runs holds a version as an array, a view
        or a memoryview of it. All of these count as references (as they do for `ndarray.resize`),
        and an array that has no others cannot get a new one: nobody could find it.
        """
        weights, self._kept = self._kept, None
        if weights is None or len(weights) != size or weights.base is not None:
            return None
        return weights if sys.getrefcount(weights) == OWN_REFERENCES else None
