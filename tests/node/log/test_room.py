"""An array is written to again only when nobody else holds it."""

from __future__ import annotations

import numpy as np

from node.log.room import Room


def kept(hold: object = None) -> tuple[Room, object]:
    room, weights = Room(), np.arange(100, dtype=np.int32)
    held = {
        "nobody": None,
        "array": weights,
        "view": weights[10:20],
        "memory": weights.data.cast("B")[4:8],
    }[str(hold)]
    room.keep(weights)
    return room, held


def test_what_nobody_holds_is_given_once() -> None:
    room, _ = kept("nobody")
    taken = room.take(100)
    assert taken is not None and len(taken) == 100
    assert room.take(100) is None


def test_what_somebody_holds_is_not_given() -> None:
    for hold in ("array", "view", "memory"):
        room, held = kept(hold)
        assert held is not None and room.take(100) is None, hold


def test_of_another_size_or_another_array() -> None:
    room, _ = kept("nobody")
    assert room.take(99) is None
    room.keep(np.zeros(200, dtype=np.int32)[:100])
    assert room.take(100) is None
