"""How the agreed updates of a round become one step of the consensus, the same bits everywhere.

Decides the arithmetic: fixed point, exact norms, the clip, the robust rule, the rounding of the
mean. Knows nothing of peers, votes, deadlines or codecs.

Fixed point. The consensus is an int32 vector in units of 2**-QUANTUM_BITS (|weight| < 128,
resolution 6e-8, finer than fp32 above 1). Integer addition is exact and commutes, so no CPU,
thread count or library version can change a bit of it; fp32 weights are derived from it. It costs
no memory: every host needs one copy of the consensus beside its running weights in any case
(its update is their difference), and that copy is this one.

The rule. With sparse top-k updates a coordinate-wise median is nearly all zero: most coordinates
come from one sender. So updates are judged whole:
- norms are clipped to 1.25 times the reference (median of this round or of the last ones; honest
  norms differ by 1.1), and one of 4 times the reference is left out;
- each update gets a score, its exact cosine to the trend (the sum of the last steps) plus the sum
  of the other updates. One round's sparse updates overlap too little to tell a sign flip; the trend
  does. Left out is who opposes it more than the others do, now or on the average of its last rounds
  (scores stand in the log), and who is aimless while the others clearly are not.
What was left out or clipped away is not lost: its sender knows the same numbers and keeps it (see
swarm/feedback.py). `tests/test_swarm_aggregate.py` holds the table by which the rule was chosen.

Known limits: noise of an ordinary norm late in training looks like an unlucky honest update and
gets 1/n of the weight; so does an old update of one's own under a new name; a colluding majority
wins. Only the canary (swarm/trust.py) sees those. Two updates cannot outvote each other, so the
rule starts at three.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np
import numpy.typing as npt

from protocol.errors import WireError

Ints = npt.NDArray[np.int64]

QUANTUM_BITS = 24
VALUE_LIMIT = 2**31  # |value| of an update, in quanta: what int32 holds
CLIP_X16 = 20  # the clip stands at 1.25 times the reference norm; honest norms differ by 1.1
REFUSE_X16 = 64  # at 4 times the reference it is no accident: left out
SEND_X16 = 48  # an honest sender stays below 3 times the recent norms: never refused for length
# Cosines to the recent trend and to the other updates, in 1/1024. Left out is an update
OPPOSED_X1024 = -51  # below -0.05 in this round
OPPOSED_GAP_X1024 = 82  # and 0.08 below the median one,
OPPOSED_MEAN_X1024 = -10  # or of a sender whose average of the last rounds is below -0.01
OPPOSED_MEAN_GAP_X1024 = 31  # and 0.03 below the median sender's,
CLEAR_X1024 = 41  # or below a quarter of the median sender's while that one is above 0.04.
MIN_PAST = 3  # an average speaks only with so many rounds behind it
SCALE_ONE = 1 << 16
SEGMENT = 1 << 15  # coordinates per pass: what fits into a core's L2 cache with its temporaries
CUT = 1 << 17  # the same for sparse updates, which touch few of them


class UpdateError(WireError):
    """An update that no honest codec produces: wrong size, order, range."""


@dataclass(frozen=True, eq=False)
class FixedUpdate:
    """A vector of `size` coordinates in quanta: all of them, or only those at `indices`."""

    size: int
    indices: Ints | None
    values: Ints

    def dense(self) -> Ints:
        if self.indices is None:
            return self.values
        out = np.zeros(self.size, dtype=np.int64)
        out[self.indices] = self.values
        return out

    def same_as(self, other: FixedUpdate) -> bool:
        return self.size == other.size and bool(np.array_equal(self.dense(), other.dense()))


def checked(update: FixedUpdate, size: int) -> FixedUpdate:
    """The same update if it is well formed for a block of `size` weights; otherwise UpdateError."""
    values, indices = update.values, update.indices
    if update.size != size:
        raise UpdateError(f"update of {update.size} weights for a block of {size}")
    if values.ndim != 1 or values.dtype.kind != "i":
        raise UpdateError("update values are not a vector of integers")
    if len(values) and not (int(values.min()) > -VALUE_LIMIT and int(values.max()) < VALUE_LIMIT):
        raise UpdateError("update value out of range")
    if indices is None:
        if len(values) != size:
            raise UpdateError(f"dense update with {len(values)} of {size} values")
    else:
        if indices.ndim != 1 or indices.dtype.kind != "i" or len(indices) != len(values):
            raise UpdateError("update indices do not match its values")
        if len(indices) and (
            int(indices[0]) < 0 or int(indices[-1]) >= size or bool(np.any(np.diff(indices) <= 0))
        ):
            raise UpdateError("update indices are not ascending within the block")
        indices = indices.astype(np.int64, copy=False)
    return FixedUpdate(size, indices, values.astype(np.int64, copy=False))


def from_codec(size: int, indices: Ints | None, values: Ints, bits: int) -> FixedUpdate:
    """A decoded update (units of 2**-bits, bits >= QUANTUM_BITS) in quanta, checked.

    Halves are rounded away from zero. The sender does the same to its own update before it books
    it, so what the rounding drops stays unsent.
    """
    unit = 1 << (bits - QUANTUM_BITS)
    if values.ndim != 1 or values.dtype.kind != "i":
        raise UpdateError("update values are not a vector of integers")
    if len(values) and max(int(values.max()), -int(values.min())) >= VALUE_LIMIT * unit - unit:
        raise UpdateError("update value out of range")
    return checked(FixedUpdate(size, indices, rounded_mean(values.astype(np.int64), unit)), size)


def exact_dot(a: Ints, b: Ints) -> int:
    """Inner product as a Python int, exact for |a|, |b| < 2**35.

    In segments that stay in the cache. Mostly the values are small enough that a segment's sum of
    products fits into an int64; else both are cut into halves of 18 bits: |high| <= 2**17 and
    low < 2**18, so a product is below 2**36 and the sum of a segment below 2**52.
    """
    total = 0
    for start in range(0, len(a), SEGMENT):
        x, y = a[start : start + SEGMENT], b[start : start + SEGMENT]
        largest = _magnitude(x)
        if largest * (largest if a is b else _magnitude(y)) * len(x) < 1 << 63:
            total += int(np.dot(x, y))
            continue
        x1, x0, y1, y0 = x >> 18, x & 0x3FFFF, y >> 18, y & 0x3FFFF
        middle = int(np.dot(x1, y0)) + int(np.dot(x0, y1))
        total += (int(np.dot(x1, y1)) << 36) + (middle << 18) + int(np.dot(x0, y0))
    return total


def _magnitude(values: Ints) -> int:
    return max(int(values.max()), -int(values.min()))


def norm(update: FixedUpdate) -> int:
    """Euclidean norm in quanta, rounded down."""
    return isqrt(exact_dot(update.values, update.values))


def lower_median(values: Sequence[int]) -> int:
    """The middle value; of two the lower, so that half of the senders cannot raise it."""
    return sorted(values)[(len(values) - 1) // 2]


def clip_scale(update_norm: int, limit: int) -> int:
    """The factor, in 1/65536, that brings a norm down to the limit; SCALE_ONE if it is within."""
    return SCALE_ONE if update_norm <= limit else (limit * SCALE_ONE) // update_norm


def norm_limit(recent_norms: Sequence[int]) -> int | None:
    """What a sender shrinks its own update to: beyond it the others clip, far beyond they refuse.

    `recent_norms`, oldest first, are those of the log; None while it has no past. What does not fit
    is unsent and follows in the next rounds. The last round counts as well as the median: in a
    run's first rounds all norms grow, with the warm-up and with what top-k left over, and senders
    that all kept to 1.25 times the median held their consensus back for a hundred rounds.
    """
    reference = lower_median(recent_norms) if recent_norms else 0
    if not reference:
        return None
    latest = max(reference, recent_norms[-1])
    return min(latest * CLIP_X16, reference * SEND_X16) // 16


def scaled(update: FixedUpdate, scale: int) -> FixedUpdate:
    """update * scale / 65536, rounded toward zero: never longer than asked."""
    if scale == SCALE_ONE:
        return update
    values = np.empty(len(update.values), dtype=np.int64)
    for start in range(0, len(values), SEGMENT):
        part, out = update.values[start : start + SEGMENT], values[start : start + SEGMENT]
        np.abs(part, out=out)
        out *= scale
        out >>= 16
        np.negative(out, out=out, where=part < 0)
    return FixedUpdate(update.size, update.indices, values)


def rounded_mean(total: Ints, count: int) -> Ints:
    """total / count, halves away from zero: symmetric, so that no drift builds up over rounds."""
    result = np.empty_like(total)
    for start in range(0, len(total), SEGMENT):
        part, out = total[start : start + SEGMENT], result[start : start + SEGMENT]
        np.abs(part, out=out)
        out *= 2
        out += count
        out //= 2 * count
        np.negative(out, out=out, where=part < 0)
    return result


def add_into(total: Ints, update: FixedUpdate, times: int = 1) -> None:
    """total += times * update, in place."""
    at = slice(None) if update.indices is None else update.indices
    if times == 1:
        total[at] += update.values
    elif times == -1:
        total[at] -= update.values
    else:
        total[at] += times * update.values


def summed(parts: Sequence[tuple[FixedUpdate, int]]) -> FixedUpdate:
    """The sum of updates, each taken so many times, in its shorter form."""
    return _summed_against(parts, ())[0]


def _summed_against(
    parts: Sequence[tuple[FixedUpdate, int]], others: Sequence[FixedUpdate]
) -> tuple[FixedUpdate, list[int]]:
    """The sum of `parts`, and the inner product of each of `others` with it."""
    size, dense = parts[0][0].size, any(part.indices is None for part, _ in parts)
    whole = np.empty(size if dense else 0, dtype=np.int64)
    found: list[tuple[Ints, Ints]] = []
    products = _Products(others)
    for start, total in _pieces(parts, whole if dense else None):
        products.add(start, total)
        if not dense:
            kept = np.flatnonzero(total != 0)  # of bools it is several times as fast
            found.append((kept + start, total[kept]))
    return (compact(whole) if dense else _joined(size, found)), products.done()


def _pieces(
    parts: Sequence[tuple[FixedUpdate, int]], whole: Ints | None = None
) -> Iterator[tuple[int, Ints]]:
    """The sum of updates, one piece after another: where it starts, and its coordinates.

    A piece stays in the cache: of sparse updates no dense vector is ever written to memory. Without
    `whole` to write to, a piece is valid until the next one.
    """
    size = parts[0][0].size
    scratch = np.empty(min(CUT, size), dtype=np.int64) if whole is None else whole
    ends = [_ends(part) for part, _ in parts]
    for number, start in enumerate(range(0, size, CUT)):
        stop = min(start + CUT, size)
        total = scratch[: stop - start] if whole is None else scratch[start:stop]
        total.fill(0)
        for (part, times), at in zip(parts, ends, strict=True):
            if part.indices is None:
                piece = FixedUpdate(len(total), None, part.values[start:stop])
            else:
                here = slice(at[number], at[number + 1])
                piece = FixedUpdate(len(total), part.indices[here] - start, part.values[here])
            add_into(total, piece, times)
        yield start, total


class _Products:
    """Inner products of updates with a vector that comes in pieces."""

    def __init__(self, updates: Sequence[FixedUpdate]) -> None:
        self._updates, self._found = updates, [0] * len(updates)
        self._ends = [_ends(update) for update in updates]
        # What the vector is where a sparse update has values: one product at the end is cheaper.
        self._met: list[list[Ints]] = [[] for _ in updates]

    def add(self, start: int, total: Ints) -> None:
        number = start // CUT
        for i, (update, ends) in enumerate(zip(self._updates, self._ends, strict=True)):
            if update.indices is None:
                self._found[i] += exact_dot(update.values[start : start + len(total)], total)
            else:
                here = slice(ends[number], ends[number + 1])
                self._met[i].append(total[update.indices[here] - start])

    def done(self) -> list[int]:
        return [
            product + (exact_dot(update.values, np.concatenate(met)) if met else 0)
            for product, update, met in zip(self._found, self._updates, self._met, strict=True)
        ]


def _ends(update: FixedUpdate) -> list[int]:
    """Where each piece of a sparse update begins, and the last one ends."""
    if update.indices is None:
        return []
    bounds = np.arange(0, update.size + CUT, CUT)
    ends: list[int] = np.searchsorted(update.indices, bounds).tolist()
    return ends


def _joined(size: int, found: Sequence[tuple[Ints, Ints]]) -> FixedUpdate:
    indices = np.concatenate([at for at, _ in found]) if found else np.zeros(0, dtype=np.int64)
    values = np.concatenate([v for _, v in found]) if found else np.zeros(0, dtype=np.int64)
    sparse = FixedUpdate(size, indices.astype(np.int64, copy=False), values)
    return sparse if 2 * len(indices) < size else FixedUpdate(size, None, sparse.dense())


def compact(dense: Ints) -> FixedUpdate:
    """The shorter of the two forms of a dense vector (an index costs as much as a value)."""
    indices = np.flatnonzero(dense != 0).astype(np.int64, copy=False)
    if 2 * len(indices) < len(dense):
        return FixedUpdate(len(dense), indices, dense[indices])
    return FixedUpdate(len(dense), None, dense)


class Rule(enum.Enum):
    """How updates are combined. All but AGREE stand in the attack table as controls."""

    MEAN = "mean"  # plain averaging
    CLIP = "clip"  # norm clip, then the mean
    AGREE = "agree"  # norm clip, leave out who opposes the rest, then the mean
    MEDIAN = "median"  # coordinate-wise lower median of the clipped updates


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The step of a round. `scales[i]` is the part of update i that went in, in 1/65536."""

    delta: FixedUpdate
    scales: tuple[int, ...]
    median_norm: int
    scores: tuple[int, ...] = ()

    @property
    def contributors(self) -> int:
        return sum(scale > 0 for scale in self.scales)


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


def _apart(value: int, others: Sequence[int], gap: int) -> bool:
    """Below the others' median by the gap, and by more than they differ among themselves.

    The extremes of five or more are left out of that spread, or two liars would shield each other.
    """
    ranked = sorted(others)
    cut = (len(ranked) - 1) // 4
    spread = ranked[len(ranked) - 1 - cut] - ranked[cut]
    return value < lower_median(ranked) - max(gap, spread)


def _suspect(
    i: int, kept: Sequence[int], scores: Sequence[int], means: dict[int, int], rounds: int
) -> bool:
    """Opposed now, opposed on the average, or aimless on the average: always against the median.

    Near the optimum honest updates cancel, so each of them opposes the sum of the others, and those
    with other data more than the rest; only one that stands clearly apart is suspect.
    """
    rest = [k for k in kept if k != i]
    middle_mean = lower_median([means[k] for k in kept])
    if scores[i] < OPPOSED_X1024 and _apart(
        scores[i], [scores[k] for k in rest], OPPOSED_GAP_X1024
    ):
        return True
    if rounds < MIN_PAST:
        return False
    if means[i] < OPPOSED_MEAN_X1024 and _apart(
        means[i], [means[k] for k in rest], OPPOSED_MEAN_GAP_X1024
    ):
        return True
    return middle_mean > CLEAR_X1024 and 4 * means[i] < middle_mean


def _judge(
    clipped: Sequence[FixedUpdate],
    squares: Sequence[int],
    refused: set[int],
    trend: Sequence[FixedUpdate],
    past: Sequence[Sequence[int]],
) -> tuple[set[int], list[int], FixedUpdate]:
    """Who is left out, everybody's score, and the sum of those that are kept.

    Worst first, and scored again after each: a strong liar makes honest updates look opposed as
    long as it is part of the sum. At most a minority goes, so that liars cannot argue the majority
    away.
    """
    out, most = set(refused), (len(clipped) - 1) // 2
    trend_squared, products_along = 0, _Products(clipped)
    for start, piece in _pieces([(step, 1) for step in trend]) if trend else ():
        trend_squared += exact_dot(piece, piece)
        products_along.add(start, piece)
    along = products_along.done()
    while True:
        kept = [i for i in range(len(clipped)) if i not in out]
        nothing = (scaled(clipped[0], 0), 1)
        total, products = _summed_against([(clipped[i], 1) for i in kept] or [nothing], clipped)
        scores = _scores(squares, out, products, along, trend_squared)
        if len(out) >= most or len(clipped) < 3:
            return out, scores, total
        means = {i: (sum(past[i]) + scores[i]) // (len(past[i]) + 1) for i in kept}
        suspects = [i for i in kept if _suspect(i, kept, scores, means, len(past[i]))]
        if not suspects:
            return out, scores, total
        out.add(min(suspects, key=lambda i: (means[i], i)))


def _median(clipped: Sequence[FixedUpdate]) -> Ints:
    stacked = np.sort(np.stack([update.dense() for update in clipped]), axis=0)
    low, high = stacked[(len(clipped) - 1) // 2], stacked[len(clipped) // 2]
    return rounded_mean(low + high, 2)


def aggregate(
    updates: Sequence[FixedUpdate],
    *,
    rule: Rule = Rule.AGREE,
    recent_norms: Sequence[int] = (),
    trend: FixedUpdate | Sequence[FixedUpdate] | None = None,
    past_scores: Sequence[Sequence[int]] = (),
) -> Aggregate:
    """Combine checked updates, given in the order of their digests.

    From the log, hence equal on every replica of the same consensus: `recent_norms`, the median
    norms of the last rounds (with one or two updates there is no majority to measure against, but
    there is a past, and a sender of tiny updates cannot clip the others to nothing); `trend`, the
    sum of the last steps, or those steps; `past_scores`, for each update the last scores of its
    sender.
    """
    if not updates:
        raise ValueError("nothing to aggregate")
    past = list(past_scores) or [()] * len(updates)
    squares = [exact_dot(update.values, update.values) for update in updates]
    norms = [isqrt(square) for square in squares]
    median_norm = lower_median(norms)
    reference = max(median_norm, lower_median(recent_norms) if recent_norms else 0)
    scales = [SCALE_ONE] * len(updates)
    if rule is not Rule.MEAN:
        scales = [clip_scale(length, reference * CLIP_X16 // 16) for length in norms]
    clipped = [scaled(update, scale) for update, scale in zip(updates, scales, strict=True)]
    if rule is Rule.MEDIAN:
        return Aggregate(compact(_median(clipped)), tuple(scales), median_norm)
    scores: list[int] = []
    if rule is Rule.AGREE:
        oversized = {i for i, length in enumerate(norms) if 16 * length > REFUSE_X16 * reference}
        squares = [
            square if scale == SCALE_ONE else exact_dot(update.values, update.values)
            for square, scale, update in zip(squares, scales, clipped, strict=True)
        ]
        steps = (trend,) if isinstance(trend, FixedUpdate) else tuple(trend or ())
        out, scores, total = _judge(clipped, squares, oversized, steps, past)
        scales = [0 if i in out else scale for i, scale in enumerate(scales)]
        # A scale of 0 is an update clipped to nothing: it is not counted either.
    else:
        total = summed([(update, 1) for update in clipped])
    delta = mean_step(total, max(sum(scale > 0 for scale in scales), 1))
    return Aggregate(delta, tuple(scales), median_norm, tuple(scores))


def mean_step(total: FixedUpdate, count: int) -> FixedUpdate:
    """The rounded mean of a sum of updates, in its shorter form."""
    values = rounded_mean(total.values, count)
    if total.indices is None:
        return compact(values)
    kept = np.flatnonzero(values != 0)  # a mean may be rounded to nothing
    return FixedUpdate(total.size, total.indices[kept], values[kept])


def combine_groups(groups: Sequence[tuple[FixedUpdate, int]]) -> FixedUpdate:
    """Mean of the groups' aggregates, each weighted by how many updates went into it."""
    total = np.zeros(groups[0][0].size, dtype=np.int64)
    for delta, contributors in groups:
        add_into(total, delta, contributors)
    return compact(rounded_mean(total, sum(contributors for _, contributors in groups)))


def apply_step(
    consensus: npt.NDArray[np.int32], delta: FixedUpdate
) -> tuple[npt.NDArray[np.int32], FixedUpdate]:
    """The next consensus, and the step as it really was.

    A weight that would leave int32 stays at its edge; the returned step says so, which makes every
    step of the log exactly reversible: old + step = new and new - step = old.
    """
    edge = VALUE_LIMIT - 1
    if delta.indices is not None:
        before = consensus[delta.indices].astype(np.int64)
        after = np.clip(before + delta.values, -edge, edge)
        new = consensus.copy()
        new[delta.indices] = after
        if np.array_equal(after, before + delta.values):
            return new, delta
        changed = FixedUpdate(delta.size, delta.indices, after - before)
        return new, compact(changed.dense())
    new, whole = np.empty_like(consensus), True
    for start in range(0, len(consensus), SEGMENT):
        part = consensus[start : start + SEGMENT] + delta.values[start : start + SEGMENT]
        whole = whole and _magnitude(part) <= edge
        new[start : start + SEGMENT] = np.clip(part, -edge, edge)
    return new, delta if whole else compact(new.astype(np.int64) - consensus)


def to_float(consensus: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """The fp32 weights of a consensus: one correctly rounded division by a power of two."""
    return (consensus.astype(np.float64) * 2.0**-QUANTUM_BITS).astype(np.float32)


def to_fixed(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """The nearest consensus to fp32 weights (used once, for a run's first weights)."""
    quanta = np.rint(weights.astype(np.float64) * 2.0**QUANTUM_BITS)
    return np.clip(quanta, -(VALUE_LIMIT - 1), VALUE_LIMIT - 1).astype(np.int32)


def weights_digest(consensus: npt.NDArray[np.int32]) -> bytes:
    """The name of a consensus: blake2b over its little-endian int32 values."""
    state = hashlib.blake2b(b"blockswarm weights 1", digest_size=32)
    state.update(len(consensus).to_bytes(8, "big"))
    state.update(np.ascontiguousarray(consensus, dtype="<i4").data)
    return state.digest()


def step_digest(delta: FixedUpdate) -> bytes:
    """The name of a step, whatever form it is held in."""
    state = hashlib.blake2b(b"blockswarm step 1", digest_size=32)
    values, indices = delta.values, delta.indices
    kept = np.flatnonzero(values != 0)
    if len(kept) < len(values):
        values, indices = values[kept], kept if indices is None else indices[kept]
    elif indices is None:
        indices = kept
    state.update(delta.size.to_bytes(8, "big"))
    state.update(np.ascontiguousarray(indices, dtype="<i8").data)
    state.update(np.ascontiguousarray(values, dtype="<i8").data)
    return state.digest()
