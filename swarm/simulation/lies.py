"""What a lying replica of the simulator sends and says instead of the truth.

Decides the lies. Knows nothing of when they are told, nor of who finds out.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import replace

import numpy as np

from swarm.consensus.fixed_point import FixedUpdate, norm
from swarm.consensus.votes import Vote


class Lie(enum.Enum):
    """What a lying replica does with its update or its vote."""

    NONE = "none"
    SIGN_FLIP = "sign flip"
    SCALE = "scale by 100"
    NOISE = "noise"
    MALFORMED = "malformed"
    REPLAY = "replay of an old update"
    STALE = "an old update under a new name"
    TWO_FACED = "different votes for different peers"
    SILENT = "announces, never delivers"


def falsified(lie: Lie, honest: FixedUpdate, numbers: np.random.Generator) -> FixedUpdate:
    """The update that is sent in place of the honest one."""
    values, indices = honest.values, honest.indices
    match lie:
        case Lie.SIGN_FLIP:
            return FixedUpdate(honest.size, indices, -values)
        case Lie.SCALE:
            return FixedUpdate(honest.size, indices, values * 100)
        case Lie.NOISE:
            places = np.sort(numbers.choice(honest.size, len(values), replace=False))
            spread = max(norm(honest), 1) / max(len(values), 1) ** 0.5
            noise = np.rint(numbers.normal(size=len(values)) * spread).astype(np.int64)
            return FixedUpdate(honest.size, places.astype(np.int64), noise)
        case Lie.MALFORMED:
            return FixedUpdate(honest.size + 1, indices, values)
    return honest


def spoken(lie: Lie, vote: Vote, peer: str) -> Vote:
    """What a peer hears of a vote."""
    if lie is Lie.TWO_FACED and hashlib.blake2b(peer.encode()).digest()[0] & 1:
        return replace(vote, listed=())
    return vote
