"""The agreed updates of a round as one step of the consensus: clip, robust rule, mean.

In integer arithmetic (`swarm.consensus.fixed_point`'s), so every replica gets the same bits.

With sparse top-k updates a coordinate-wise median is nearly all zero, since most coordinates come
from one sender. So updates are judged as a whole:
- Norms are clipped to 1.25 times the reference: the median of this round or of the last ones
  (honest norms differ by 1.1). An update above 4 times both the reference and the last round's norm
  is left out. A single update is no reference for itself: it is clipped to 2.5 times the norms in
  the log.
- A *silent* update, below 1/16 of the last rounds' norm, is left out and not part of the median,
  unless most are as small. Otherwise half of the senders could set the median with empty updates,
  which cost no work: they would clip the others to nothing, and have all votes as soon as nobody
  else was included.
- Each update gets a score: its exact cosine to the trend (the sum of the last steps) plus the sum
  of the other updates. The sparse updates of one round overlap too little to show a sign flip; the
  trend shows it. An update is left out if it clearly opposes, in this round, what the others
  clearly agree on, or if its sender's average score over the last rounds (from the log) is far
  below the others'.
What is left out or clipped away is not lost: its sender computes the same numbers and keeps it (see
swarm/consensus/feedback.py).

Disagreement alone is no evidence. Once replicas have converged, each pulls toward its own text and
their updates cancel: all scores are below zero, some always lower than the rest, and a sender that
is left out once falls behind and disagrees even more. So no update is judged unless the others
agree on a direction; an attacker that drags the consensus away gives them one. Significance is
measured: in one round by the number of coordinates, over rounds by the variance of the others'
scores. Rules tried on simulated swarms of 4, means of 20 seeds: honest updates left out in 100
rounds, with little and with much noise in their training, and sign flips by one of the four that
were included in 30 rounds, the last few of them converged:

    left out if                                               honest out       flips in
    below -0.05 now or -0.01 on average, and further below
      the others' median than they are apart                  51.5    57.8     0.1
    on average below a quarter of the others' median, if
      that is 0.04 and the gap 3 / sqrt(all coordinates);
      or half opposed now (most ordinary noise goes in)       0       0        5.6
    the same from 0.01 on, a gap of 3 of their deviations     0.5     2.0      3.5
    the same, a gap of 5 of their deviations                  0       0.2      3.6

That holds where all hosts are known to have the same text (`same_text`). A host with another text
ends where its pull balances the others', so its score falls below zero however honest it is: of
four real hosts, three with prose and one with code, the latter was left out in 88 of 150 rounds. So
where texts may differ, the rule over rounds only leaves out senders whose average *opposes* a
quarter of what the others agree on. There noise is included with 1/n of the weight.

`tests/swarm/consensus/test_aggregate.py` holds the rule against a clip alone, mean and median.

Known limits: where nothing is agreed on, noise and sign flips of ordinary norm are included with
1/n of the weight; so is a sender's old update under a new digest while it still helps; a colluding
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
REFUSE_X16 = 64  # above 4 times the reference an update is left out
SEND_X16 = 40  # an honest sender shrinks its update to 2.5 times the recent norms
# Scores are cosines in 1/1024.
AGREED_X1024 = 10  # below a median score of 0.01 the others agree on no direction
# In standard deviations: of a cosine of random signs (1 / sqrt(coordinates)), and of the others'
# scores, where rounds are not independent since their trends overlap.
NOW_DEVIATIONS_SQUARED = 3**2
MEAN_DEVIATIONS_SQUARED = 5**2
SILENT_X16 = 1  # below 1/16 of the recent norms an update is silent
PAIR_TIMES = 16 // SILENT_X16  # of two updates, the log's norm is at most this times the shorter's
MIN_PAST = 3  # an average is used only over more rounds than this

Trending = Trend | FixedUpdate | None


def lower_median(values: Sequence[int]) -> int:
    """The median; of two middle values the lower, so that half of the senders cannot raise it."""
    return sorted(values)[(len(values) - 1) // 2]


def upper_median(values: Sequence[int]) -> int:
    """The median; of two middle values the upper, so that half of the senders cannot lower it."""
    return sorted(values)[len(values) // 2]


def clip_scale(update_norm: int, limit: int) -> int:
    """The factor, in 1/65536, that clips a norm to the limit; SCALE_ONE if it is within."""
    return SCALE_ONE if update_norm <= limit else (limit * SCALE_ONE) // update_norm


def norm_limit(recent_norms: Sequence[int]) -> int | None:
    """The norm to which a sender shrinks its own update, so that it is not refused for its length.

    `recent_norms`, oldest first, are those of the log; None if there are none. The rest stays
    unsent and follows in the next rounds. The limit counts the last round as well as the median,
    and is far wider than the clip: in a run's first rounds all norms grow two- and threefold, with
    the warm-up and with what top-k left over. Senders limited to 1.25 times the last round held
    their consensus back for 16 rounds, which cost 4 honest replicas 0.046 nats after 60.
    """
    reference = _recent(recent_norms)
    return reference * SEND_X16 // 16 if reference else None


def _recent(norms: Sequence[int]) -> int:
    return max(lower_median(norms), norms[-1]) if norms else 0


def _reference(norms: Sequence[int], recent_norms: Sequence[int]) -> int:
    """The reference norm of a round's updates."""
    median = lower_median(norms)
    allowed = norm_limit(recent_norms)
    if len(norms) == 1 and allowed is not None:
        return min(median, allowed * 16 // CLIP_X16)
    if len(norms) == 2:  # see `_norm_to_log`
        return max(median, _recent(recent_norms)) if recent_norms else upper_median(norms)
    return max(median, lower_median(recent_norms) if recent_norms else 0)


def _silent(norms: Sequence[int], recent_norms: Sequence[int]) -> set[int]:
    """The silent updates. If most are far smaller than those of the last rounds, training itself
    has changed, and a sender of large updates must not decide alone: then only empty ones count as
    silent."""
    floor = lower_median(recent_norms) * SILENT_X16 // 16 if recent_norms else 0
    small = {i for i, length in enumerate(norms) if length <= floor}
    if 2 * len(small) <= len(norms):
        return small
    return {i for i, length in enumerate(norms) if length == 0}


def _norm_to_log(norms: Sequence[int], recent_norms: Sequence[int]) -> int:
    """The norm of a round for the log: the median; between two middle values, the one nearest to
    the last rounds. So only more than half of the senders can move it either way.

    Of two senders a slow one must not hold the other back: the longer update counts, up to 16 times
    the shorter one and with a growth of at most an eighth a round. Known limit: so far one of two
    senders can raise what the other accepts.
    """
    recent = lower_median(recent_norms) if recent_norms else 0
    if len(norms) == 2:
        last, most = _recent(recent_norms), PAIR_TIMES * lower_median(norms)
        recent = min(last + last // 8 if last else upper_median(norms), most)
    return min(max(lower_median(norms), recent), upper_median(norms))


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The step of a round. `scales[i]` is the factor of update i in 1/65536; 0: left out.

    `median_norm` goes into the log, as the reference for the next rounds.
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

    `products` are each update's with `total`, the sum of the updates not in `out`; their sum over
    those updates is the square of `total`. `along` are the products with the trend.
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
    """Whether an update opposes the others in this round: by at least half of their agreement, and
    significantly for its number of coordinates."""
    agreed = lower_median(others)
    if agreed < AGREED_X1024 or 2 * score >= -agreed:
        return False
    coordinates = int(np.count_nonzero(update.values))
    return (agreed - score) ** 2 * coordinates > NOW_DEVIATIONS_SQUARED << 20


def _takes_no_part(run: Sequence[int], others: Sequence[Sequence[int]], same_text: bool) -> bool:
    """Whether a sender's average score is significantly below a quarter of the others' median;
    where texts may differ, below minus a quarter of it."""
    known = [other for other in others if len(other) > MIN_PAST]
    if len(run) <= MIN_PAST or len(known) < 2:
        return False
    mean, agreed = _mean(run), lower_median([_mean(other) for other in known])
    if agreed < AGREED_X1024 or 4 * mean >= (agreed if same_text else -agreed):
        return False
    # The median: a sender whose scores vary much does not shield the others.
    usual = lower_median([_variance(other) for other in known])
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
    """Which updates are left out, all scores, and the sum of the kept updates.

    The worst is removed first and the rest scored again, since a strong attacker in the sum makes
    honest updates look opposed. At most a minority is removed, so that attackers cannot have the
    majority removed; silent updates do not count.
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
    if len(heard) != 2:  # `_norm_to_log` has bounded that of two already
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
    """The total work in updates of these norms, in 1/256 of a host with a median update.

    A host with a tenth of the others' speed makes a tenth of the steps, and in a plain mean its
    short update would dilute theirs. So an update shorter than the median counts in proportion to
    its norm. Norms are measured, where numbers of steps could only be claimed. Of two updates the
    longer one counts as the median.
    """
    if not norms:
        return 0
    usual = max(upper_median(norms), 1)
    return sum(min(WORK_ONE, max(1, length * WORK_ONE // usual)) for length in norms)
