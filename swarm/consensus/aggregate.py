"""How the agreed updates of a round become one step of the consensus, the same bits everywhere.

Decides the clip, the robust rule and the mean. The integers are `swarm.consensus.fixed_point`'s.
Knows nothing of peers, votes, deadlines or codecs.

With sparse top-k updates a coordinate-wise median is nearly all zero: most coordinates come from
one sender. So updates are judged whole:
- norms are clipped to 1.25 times the reference (median of this round or of the last ones; honest
  norms differ by 1.1), and one of 4 times the reference, or the last round, is left out. Who sends
  alone is no reference for itself: it is clipped to what a sender may be by the log, 2.5 times;
- an update of less than 1/16 of the last rounds' norm says nothing, unless most are as small: it is
  left out and measures nobody. Otherwise half of the senders, with empty updates that cost no work,
  would be the median: they would clip the others to nothing, and have all votes once nobody else
  was included;
- each update gets a score, its exact cosine to the trend (the sum of the last steps) plus the sum
  of the other updates. One round's sparse updates overlap too little to tell a sign flip; the trend
  does. Left out is who clearly opposes, now, what the others clearly agree on, or who, on the
  average of its last rounds (scores stand in the log), does not take part in it.
What was left out or clipped away is not lost: its sender knows the same numbers and keeps it (see
swarm/consensus/feedback.py).

Disagreement alone is no evidence. Once the replicas have converged, each pulls toward its own text
and their updates cancel: all scores are below zero, some always more than the rest, and who is left
out once falls behind and disagrees even more. So nobody is judged unless the others agree on a
direction; a liar who drags the consensus from where they want it gives them one. How sure is sure
is measured: in one round by the number of coordinates, over rounds by how much the others' scores
vary. Rules that were tried on simulated swarms of 4, means of 20
seeds: honest updates left out in 100 rounds, with little and with much noise in their training, and
sign flips of one of the four that went in in 30 rounds, where the last few have converged:

    left out is who is                                        honest out       flips in
    below -0.05 now or -0.01 on average, and further below
      the others' median than they are apart                  51.5    57.8     0.1
    on average below a quarter of the others' median, if
      that is 0.04 and the gap 3 / sqrt(all coordinates);
      or half opposed now (most ordinary noise goes in)       0       0        5.6
    the same from 0.01 on, a gap of 3 of their deviations     0.5     2.0      3.5
    the same, a gap of 5 of their deviations                  0       0.2      3.6

That holds where all hosts are known to have the same text (`same_text`). A host with another text
ends where its pull balances that of the others, so its score falls below zero however honest it is:
of four real ones, three with prose and one with code, that one was left out in 88 of 150 rounds. So
where texts may differ, only who on the average *opposes* a quarter of what the others agree on is
left out, beside who clearly opposes them now. There noise goes in with 1/n of the weight.

`tests/swarm/consensus/test_aggregate.py` holds the rule against a clip alone, mean and median.

Known limits: where nothing is agreed on, noise and flips of an ordinary norm go in with 1/n of the
weight; so does an old update of one's own under a new name while it still helps; a colluding
majority wins. Only the canary (swarm/consensus/trust.py) sees those. Two updates cannot outvote
each other, so the rule starts at three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np

from protocol.limits import WORK_ONE
from swarm.consensus.fixed_point import (
    SCALE_ONE,
    FixedUpdate,
    scaled,
)
from swarm.consensus.sums import mean_step, sparse_against, summed_against
from swarm.consensus.trend import Trend

CLIP_X16 = 20  # the clip stands at 1.25 times the reference norm; honest norms differ by 1.1
REFUSE_X16 = 64  # at 4 times the reference it is no accident: left out
SEND_X16 = 40  # an honest sender stays below 2.5 times the recent norms: not refused for length
# Scores are cosines in 1/1024.
AGREED_X1024 = 10  # below 0.01 the others agree on nothing that could be opposed
NOW_DEVIATIONS_SQUARED = 3**2  # of a cosine of random signs, 1 / sqrt(coordinates): seldom as large
MEAN_DEVIATIONS_SQUARED = 5**2  # of the others' scores about their averages; rounds are not quite
# independent, since their trends overlap
SILENT_X16 = 1  # below 1/16 of the recent norms an update says nothing
PAIR_TIMES = 16 // SILENT_X16  # of two, a shorter update than that says nothing
MIN_PAST = 3  # an average speaks only with so many rounds behind it

Trending = Trend | FixedUpdate | None


def lower_median(values: Sequence[int]) -> int:
    """The middle value; of two the lower, so that half of the senders cannot raise it."""
    return sorted(values)[(len(values) - 1) // 2]


def upper_median(values: Sequence[int]) -> int:
    """The middle value; of two the upper, so that half of the senders cannot lower it."""
    return sorted(values)[len(values) // 2]


def clip_scale(update_norm: int, limit: int) -> int:
    """The factor, in 1/65536, that brings a norm down to the limit; SCALE_ONE if it is within."""
    return SCALE_ONE if update_norm <= limit else (limit * SCALE_ONE) // update_norm


def norm_limit(recent_norms: Sequence[int]) -> int | None:
    """What a sender shrinks its own update to, so that the others do not refuse it for its length.

    `recent_norms`, oldest first, are those of the log; None while it has no past. What does not fit
    is unsent and follows in the next rounds. The last round counts as well as the median, and far
    more than the clip is allowed: in a run's first rounds all norms grow two- and threefold, with
    the warm-up and with what top-k left over. Senders that kept to 1.25 times the last round held
    their consensus back for 16 rounds, which cost 4 honest replicas 0.046 nats after 60; the
    receivers' clip measures against the others of the same round and needs no such help.
    """
    reference = _recent(recent_norms)
    return reference * SEND_X16 // 16 if reference else None


def _recent(norms: Sequence[int]) -> int:
    return max(lower_median(norms), norms[-1]) if norms else 0


def _reference(norms: Sequence[int], recent_norms: Sequence[int]) -> int:
    """The norm that a round's updates are measured against."""
    median = lower_median(norms)
    allowed = norm_limit(recent_norms)
    if len(norms) == 1 and allowed is not None:
        return min(median, allowed * 16 // CLIP_X16)
    if len(norms) == 2:  # see `_norm_to_log`
        return max(median, _recent(recent_norms)) if recent_norms else upper_median(norms)
    return max(median, lower_median(recent_norms) if recent_norms else 0)


def _silent(norms: Sequence[int], recent_norms: Sequence[int]) -> set[int]:
    """The updates that say nothing. If most are far smaller than those of the last rounds, then it
    is training that has changed, and who sends as much as before must not decide alone: only empty
    ones say nothing."""
    floor = lower_median(recent_norms) * SILENT_X16 // 16 if recent_norms else 0
    small = {i for i, length in enumerate(norms) if length <= floor}
    if 2 * len(small) <= len(norms):
        return small
    return {i for i, length in enumerate(norms) if length == 0}


def _norm_to_log(norms: Sequence[int], recent_norms: Sequence[int]) -> int:
    """What the log keeps of a round's norms: the median, and where two are in the middle, what is
    nearest to the last rounds. So it takes more than half of the senders to move it either way.

    Of two senders one may be slow, and must not hold the other back: the longer update is the
    measure, up to 16 times the shorter one, as long as it grows by no more than an eighth a round.
    Two cannot outvote each other in anything; that is how far a liar can raise what its only
    partner accepts.
    """
    recent = lower_median(recent_norms) if recent_norms else 0
    if len(norms) == 2:
        last, most = _recent(recent_norms), PAIR_TIMES * lower_median(norms)
        recent = min(last + last // 8 if last else upper_median(norms), most)
    return min(max(lower_median(norms), recent), upper_median(norms))


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The step of a round. `scales[i]` is the part of update i that went in, in 1/65536.

    `median_norm` is what the log keeps to measure the next rounds against.
    """

    delta: FixedUpdate
    scales: tuple[int, ...]
    median_norm: int
    scores: tuple[int, ...]
    work: int  # of all of them together: see `work_of`


def _scores(
    squares: Sequence[int],
    out: set[int],
    products: Sequence[int],
    along: Sequence[int],
    trend_squared: int,
) -> list[int]:
    """Cosine of each update to trend + total without the update itself, in 1/1024, rounded down.

    `products` are those with `total`, the sum of the updates not in `out`: its square is the sum of
    its products with them. `along` are the products with the trend.
    """
    kept = [i for i in range(len(squares)) if i not in out]
    total_squared = trend_squared + sum(products[i] + 2 * along[i] for i in kept)
    scores = []
    for i, own_squared in enumerate(squares):
        product, rest_squared = products[i] + along[i], total_squared
        if i not in out:
            rest_squared += own_squared - 2 * product
            product -= own_squared
        size = isqrt(own_squared * max(rest_squared, 0))
        scores.append((product << 10) // size if size else 0)
    return scores


def _mean(scores: Sequence[int]) -> int:
    return sum(scores) // len(scores)


def _variance(run: Sequence[int]) -> int:
    mean = _mean(run)
    return sum((score - mean) ** 2 for score in run) // len(run)


def _opposes(score: int, others: Sequence[int], update: FixedUpdate) -> bool:
    """Whether one round is enough: against the others, half as much as they agree at least."""
    agreed = lower_median(others)
    if agreed < AGREED_X1024 or 2 * score >= -agreed:
        return False
    coordinates = int(np.count_nonzero(update.values))
    return (agreed - score) ** 2 * coordinates > NOW_DEVIATIONS_SQUARED << 20


def _takes_no_part(run: Sequence[int], others: Sequence[Sequence[int]], same_text: bool) -> bool:
    """Whether a sender's average is below a quarter of what the others agree, and surely so; where
    texts may differ, below a quarter of the opposite."""
    known = [other for other in others if len(other) > MIN_PAST]
    if len(run) <= MIN_PAST or len(known) < 2:
        return False
    mean, agreed = _mean(run), lower_median([_mean(other) for other in known])
    if agreed < AGREED_X1024 or 4 * mean >= (agreed if same_text else -agreed):
        return False
    usual = lower_median([_variance(other) for other in known])  # one who varies shields nobody
    return (agreed - mean) ** 2 * len(run) > MEAN_DEVIATIONS_SQUARED * usual


def _suspect(
    i: int,
    update: FixedUpdate,
    scores: Sequence[int],
    runs: Mapping[int, Sequence[int]],
    same_text: bool,
) -> bool:
    rest = [k for k in runs if k != i]
    return _opposes(scores[i], [scores[k] for k in rest], update) or _takes_no_part(
        runs[i], [runs[k] for k in rest], same_text
    )


def _along(trend: Trending, updates: Sequence[FixedUpdate]) -> tuple[list[int], int]:
    """The inner products of updates with the trend, and its own square."""
    if trend is None:
        return [0] * len(updates), 0
    if isinstance(trend, Trend):
        return trend.products(updates), trend.squared
    return summed_against([(trend, 1)], updates)[1], trend.squared


def _judge(
    clipped: Sequence[FixedUpdate],
    squares: Sequence[int],
    silent: set[int],
    oversized: set[int],
    trend: Trending,
    past: Sequence[Sequence[int]],
    same_text: bool,
) -> tuple[set[int], list[int], FixedUpdate]:
    """Who is left out, everybody's score, and the sum of those that are kept.

    Worst first, and scored again after each: a strong liar makes honest updates look opposed as
    long as it is part of the sum. At most a minority goes, so that liars cannot argue the majority
    away; silent ones are neither.
    """
    heard = len(clipped) - len(silent)
    out, most = silent | oversized, len(silent) + (heard - 1) // 2
    along: list[int] | None = None
    while True:
        kept = [i for i in range(len(clipped)) if i not in out]
        parts = [(clipped[i], 1) for i in kept] or [(scaled(clipped[0], 0), 1)]
        if along is not None:
            total, products = summed_against(parts, clipped)
        elif isinstance(trend, Trend) and all(u.indices is not None for u in clipped):
            # The usual case: both products in one pass over the updates.
            total, products, along = sparse_against(parts, clipped, trend.vector)
            trend_squared, along = trend.squared, along or [0] * len(clipped)
        else:
            total, products = summed_against(parts, clipped)
            along, trend_squared = _along(trend, clipped)
        scores = _scores(squares, out, products, along, trend_squared)
        if len(out) >= most or heard < 3:
            return out, scores, total
        runs = {i: (*past[i], scores[i]) for i in kept}
        suspects = [i for i in kept if _suspect(i, clipped[i], scores, runs, same_text)]
        if not suspects:
            return out, scores, total
        out.add(min(suspects, key=lambda i: (_mean(runs[i]), i)))


def aggregate(
    updates: Sequence[FixedUpdate],
    *,
    recent_norms: Sequence[int] = (),
    trend: Trending = None,
    past_scores: Sequence[Sequence[int]] = (),
    same_text: bool = True,
) -> Aggregate:
    """Combine checked updates, given in the order of their digests.

    From the log, hence equal on every replica of the same consensus: `recent_norms`, the median
    norms of the last rounds (with one or two updates there is no majority to measure against, but
    there is a past, and a sender of tiny updates cannot clip the others to nothing); `trend`, the
    sum of the last steps; `past_scores`, for each update the last scores of its sender. From the
    run file: `same_text`, whether all hosts are known to have the same.
    """
    if not updates:
        raise ValueError("nothing to aggregate")
    past = list(past_scores) or [()] * len(updates)
    squares = [update.squared for update in updates]
    norms = [isqrt(square) for square in squares]
    silent = _silent(norms, recent_norms)
    heard = [length for i, length in enumerate(norms) if i not in silent] or [0]
    reference = _reference(heard, recent_norms)
    median_norm = _norm_to_log(heard, recent_norms)
    if len(heard) != 2:  # of two it is bounded already
        median_norm = min(median_norm, reference)
    scales = [clip_scale(length, reference * CLIP_X16 // 16) for length in norms]
    clipped = [scaled(update, scale) for update, scale in zip(updates, scales, strict=True)]
    longest = max(reference, recent_norms[-1] if recent_norms else 0) * REFUSE_X16 // 16
    oversized = {i for i, length in enumerate(norms) if length > longest}
    squares = [update.squared for update in clipped]
    out, scores, total = _judge(clipped, squares, silent, oversized, trend, past, same_text)
    scales = [0 if i in out else scale for i, scale in enumerate(scales)]
    # A scale of 0 is an update clipped to nothing: it is not counted either.
    if not any(scales):
        median_norm = min(median_norm, _recent(recent_norms))  # a lie raises no limit
    work = work_of([isqrt(square) for square, scale in zip(squares, scales, strict=True) if scale])
    delta = mean_step(total, max(work, WORK_ONE))
    return Aggregate(delta, tuple(scales), median_norm, tuple(scores), work)


def work_of(norms: Sequence[int]) -> int:
    """What updates of these lengths come to together, in 1/256 of a host that did as most did.

    A host with a tenth of the others' speed makes a tenth of the steps, and in a plain mean its
    short update would take away from theirs what it does not add. So an update shorter than the
    median counts for as much as it is long. A length can be measured where a number of steps can
    only be claimed; who sends less than it did moves the others' mean less, and who sends more is
    clipped. Of two there is no middle: the longer one is the measure.
    """
    if not norms:
        return 0
    usual = max(upper_median(norms), 1)
    return sum(min(WORK_ONE, max(1, length * WORK_ONE // usual)) for length in norms)
