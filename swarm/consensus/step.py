"""The step of a round: from the agreed updates to the next entry of the log.

Used by hosts (`node.replica.aggregation`) and by benchmarks without a network
(`benchmarks.exchange`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.digests import weights_digest
from protocol.log import Contribution, Entry
from protocol.votes import UpdateRef
from swarm.consensus.aggregate import Aggregate, Trending, aggregate, clip_scale, norm_limit
from swarm.consensus.feedback import Unsent
from swarm.consensus.fixed_point import SCALE_ONE, FixedUpdate, Quanta, norm
from swarm.consensus.log import ConsensusLog
from swarm.consensus.sums import apply_step
from swarm.consensus.updates import UpdateCodec

TREND_ROUNDS = 8  # steps in the trend that updates are compared with


@dataclass(frozen=True, eq=False)
class Step:
    """A log entry, the weights after it, and the change of the weights."""

    entry: Entry
    weights: Quanta
    change: FixedUpdate


def next_step(
    log: ConsensusLog,
    number: int,
    weights: Quanta,
    updates: Sequence[tuple[UpdateRef, FixedUpdate]],
    trend: Trending,
    *,
    same_text: bool = True,
    room: Quanta | None = None,
) -> Step:
    """The step of round `number` from the head of `log`, which has these `weights`.

    `updates` must be in the order of their digests. The new weights are written to `room`, if
    given.
    """
    result = aggregate(
        [update for _, update in updates],
        recent_norms=log.recent_norms(),
        trend=trend,
        past_scores=[log.past_scores(ref.sender) for ref, _ in updates],
        same_text=same_text,
    )
    return step_of(log, number, weights, [ref for ref, _ in updates], result, room)


def step_of(
    log: ConsensusLog,
    number: int,
    weights: Quanta,
    refs: Sequence[UpdateRef],
    result: Aggregate,
    room: Quanta | None = None,
) -> Step:
    """The step of round `number` that makes `result`, of these updates, the next consensus."""
    parts = [
        Contribution(ref.digest, ref.sender, scale, score)
        for ref, scale, score in zip(refs, result.scales, result.scores, strict=True)
    ]
    new, change = apply_step(weights, result.delta, room)
    entry = Entry(
        number,
        log.head.digest,
        weights_digest(new),
        change.digest,
        result.median_norm,
        tuple(sorted(parts, key=lambda c: c.digest)),
        result.work,
    )
    return Step(entry, new, change)


def fitting_update(
    codec: UpdateCodec, rest: Unsent, log: ConsensusLog, block: int, number: int, sender: bytes
) -> tuple[bytes, FixedUpdate]:
    """An encoded update, and what all decode from it, shrunk to the norm that others accept.

    The rest stays unsent and follows in the next rounds.
    """
    payload, update = codec.encode(rest, block, number, sender)
    limit = norm_limit(log.recent_norms())
    scale = SCALE_ONE if limit is None else clip_scale(norm(update), limit)
    if scale < SCALE_ONE:
        shorter = rest.times(scale / SCALE_ONE)
        payload, update = codec.encode(shorter, block, number, sender)
    return payload, update
