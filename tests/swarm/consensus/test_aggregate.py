"""Aggregation: the same in any form, and hard to harm. The attack table is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.limits import WORK_ONE
from swarm.consensus.aggregate import aggregate, norm_limit, work_of
from swarm.consensus.fixed_point import (
    SCALE_ONE,
    VALUE_LIMIT,
    FixedUpdate,
    compact,
    exact_dot,
    norm,
    scaled,
    to_float,
)
from swarm.consensus.sums import apply_step, summed
from swarm.consensus.trend import Trend
from tests.support import other_rules
from tests.support.fixed_updates import SIZE, corrected, ints, same, unsent, vectors


@given(st.lists(vectors(), min_size=1, max_size=6), st.lists(vectors(), max_size=1))
@settings(max_examples=60)
def test_form_of_an_update_changes_nothing(
    updates: list[FixedUpdate], trend: list[FixedUpdate]
) -> None:
    dense = [FixedUpdate(SIZE, None, update.dense()) for update in updates]
    past = trend[0] if trend else None
    one, other = aggregate(updates, trend=past), aggregate(dense, trend=past)
    assert same(one.delta, other.delta)
    assert (one.scales, one.scores) == (other.scales, other.scores)
    assert one.delta.digest == FixedUpdate(SIZE, None, other.delta.dense()).digest


@given(st.lists(vectors(), min_size=1, max_size=6), st.lists(vectors(), max_size=8))
@settings(max_examples=60)
def test_a_trend_is_as_good_as_its_sum(
    updates: list[FixedUpdate], steps: list[FixedUpdate]
) -> None:
    trend, whole = Trend(), summed([(step, 1) for step in steps]) if steps else None
    trend.follow(steps)
    one, other = aggregate(updates, trend=trend), aggregate(updates, trend=whole)
    assert same(one.delta, other.delta)
    assert (one.scales, one.scores) == (other.scales, other.scores)


@given(st.lists(vectors(), min_size=3, max_size=7))
@settings(max_examples=60)
def test_most_updates_stay_and_none_grows(updates: list[FixedUpdate]) -> None:
    result = aggregate(updates)
    spoke = [norm(update) > 0 for update in updates]
    out = sum(scale == 0 for scale, said in zip(result.scales, spoke, strict=True) if said)
    assert out <= max((sum(spoke) - 1) // 2, 0) or any(
        norm(update) > 4 * result.median_norm for update in updates
    )
    assert all(0 <= scale <= SCALE_ONE for scale in result.scales)


def test_tiny_updates_cannot_clip_the_others_to_nothing() -> None:
    big, tiny = FixedUpdate(4, None, ints(1000, 0, 0, 0)), FixedUpdate(4, None, ints(1, 0, 0, 0))
    assert aggregate([big, tiny], recent_norms=(1000, 1000)).scales == (SCALE_ONE, 0)


@pytest.mark.parametrize("length", [0, 1, 62, 63, 300])
@pytest.mark.parametrize("liars", [1, 3])
def test_half_of_the_senders_cannot_shrink_a_block_to_a_halt(length: int, liars: int) -> None:
    """Empty updates cost no work. If they were a measure, they would clip the others to nothing."""
    usual = [FixedUpdate(4, None, ints(1000, i, 0, 0)) for i in range(liars)]
    short = [FixedUpdate(4, None, ints(0, 0, length, i)) for i in range(min(length, 1) * liars)]
    short += [FixedUpdate(4, None, ints(0, 0, 0, 0))] * (liars - len(short))
    recent = [1000] * 8
    for _ in range(64):
        result = aggregate([*usual, *short], recent_norms=recent[-8:])
        assert result.scales[:liars] == (SCALE_ONE,) * liars
        if length <= 62:  # they say nothing: no vote comes from them
            assert result.scales[liars:] == (0,) * liars
        recent.append(result.median_norm)
    assert min(recent) >= 1000


def test_silent_updates_do_not_protect_a_liar() -> None:
    """At most a minority is left out, of those who say something."""
    way = FixedUpdate(64, None, np.full(64, 1000, dtype=np.int64))
    flipped, empty = (FixedUpdate(64, None, way.values * factor) for factor in (-1, 0))
    updates = [way, way, way, flipped, empty, empty, empty, empty]
    assert aggregate(updates).scales == (SCALE_ONE,) * 3 + (0,) * 5
    same_step = aggregate([way, way, way]).delta
    assert same(aggregate(updates).delta, same_step)


def test_a_round_in_which_all_updates_are_small_counts() -> None:
    """A learning rate that falls, or the end of training: nobody is left to be compared with."""
    few = [FixedUpdate(4, None, ints(10, i, 0, 0)) for i in range(3)]
    result = aggregate(few, recent_norms=[1000] * 8)
    assert result.scales == (SCALE_ONE,) * 3
    assert result.median_norm < 1000


def test_one_who_goes_on_as_before_does_not_silence_the_rest() -> None:
    """Norms that fall sixteenfold at once, but for one sender: it must not have the block alone."""
    recent = [1_000_000] * 8
    few = [FixedUpdate(64, None, np.full(64, 7_500, dtype=np.int64)) for _ in range(6)]
    one = FixedUpdate(64, None, np.full(64, -125_000, dtype=np.int64))
    for _ in range(12):
        result = aggregate([*few, one], recent_norms=recent[-8:])
        assert all(result.scales[:6])
        recent.append(result.median_norm)
    assert recent[-1] < 100_000
    assert result.scales[6] == 0  # by then it is seen to be far too long


def test_nothing_from_anybody_moves_nothing() -> None:
    empty = FixedUpdate(4, None, ints(0, 0, 0, 0))
    result = aggregate([empty, empty], recent_norms=[1000] * 8)
    assert result.scales == (0, 0)
    assert not result.delta.dense().any()


def test_norms_that_grow_together_are_not_held_back() -> None:
    """Norms of a real warm-up, in thousandths. What senders shrink to keeps up."""
    norms: list[int] = []
    grow = [125, 445, 944, 1430, 1813, 2137, 2349, 2514, 2594, 2655, 2671]
    for wanted in grow:
        limit = norm_limit(norms[-8:])
        length = wanted if limit is None else min(wanted, limit)
        both = [FixedUpdate(2, None, ints(length, 0)), FixedUpdate(2, None, ints(length, 1))]
        result = aggregate(both, recent_norms=norms[-8:])
        assert result.scales == (SCALE_ONE, SCALE_ONE)
        norms.append(result.median_norm)
    assert norms[3:] == grow[3:]


@given(st.lists(st.integers(10**6, 10**9), min_size=1, max_size=8), st.integers(10**6, 10**10))
def test_what_a_sender_shrinks_to_is_never_refused(recent: list[int], others: int) -> None:
    limit = norm_limit(recent)
    assert limit is not None
    short = FixedUpdate(4, None, ints(0, others, 0, 0))
    updates = [FixedUpdate(4, None, ints(0, limit, 0, 0)), short, short]
    assert aggregate(updates, recent_norms=recent).scales[0] > 0


def test_who_sends_alone_is_no_measure_for_itself() -> None:
    """All others late, and one left who sends a hundred times what is usual: found in a storm."""
    lie = FixedUpdate(4, None, ints(100_000, 0, 0, 0))
    recent = [1000] * 8
    for _ in range(8):  # and its length gives it no more room the next time
        result = aggregate([lie], recent_norms=recent[-8:])
        assert result.scales == (0,)
        assert not result.delta.dense().any()
        recent.append(result.median_norm)
    assert recent == [1000] * 16


def test_who_sends_alone_is_clipped_to_what_a_sender_may_be() -> None:
    long, usual = (FixedUpdate(2, None, ints(length, 0)) for length in (5000, 2400))
    assert norm(aggregate([long], recent_norms=[1000] * 8).delta) in (2499, 2500)
    assert aggregate([usual], recent_norms=[1000] * 8).scales == (SCALE_ONE,)
    assert aggregate([long]).scales == (SCALE_ONE,)  # with no past there is nothing to go by
    assert aggregate([long], recent_norms=[0, 0]).scales == (SCALE_ONE,)


@given(st.lists(st.integers(10**6, 10**9), min_size=1, max_size=8))
def test_what_a_sender_shrinks_to_goes_in_whole_if_it_is_alone(recent: list[int]) -> None:
    limit = norm_limit(recent)
    assert limit is not None
    [scale] = aggregate([FixedUpdate(2, None, ints(0, limit))], recent_norms=recent).scales
    assert scale > SCALE_ONE - 256


def _apart(count: int, each: int = 16) -> list[FixedUpdate]:
    """Updates that have no coordinate in common: their scores in this round are 0."""
    size = count * each
    at = np.arange(each, dtype=np.int64)
    values = np.full(each, 1000, dtype=np.int64)
    return [FixedUpdate(size, at + i * each, values) for i in range(count)]


def _left_out(updates: list[FixedUpdate], past: Sequence[tuple[int, ...]] = ()) -> list[int]:
    scales = aggregate(updates, past_scores=past).scales
    return [i for i, scale in enumerate(scales) if not scale]


@given(st.lists(st.integers(-1024, 0), min_size=28, max_size=28))
def test_where_nothing_is_agreed_on_nobody_is_left_out(scores: list[int]) -> None:
    """Near the optimum updates cancel, and the worst of them is no liar."""
    past = [tuple(scores[i : i + 7]) for i in range(0, 28, 7)]
    assert _left_out(_apart(4), past) == []
    values = np.array([[3, 1], [-1, 2], [-1, -2], [-1, -1]], dtype=np.int64).repeat(16, axis=1)
    balanced = [FixedUpdate(32, None, row * 100) for row in values]
    assert _left_out(balanced, past) == []


def test_one_round_is_enough_if_it_has_coordinates_enough() -> None:
    for each, out in ((16, [3]), (2, [])):
        same = FixedUpdate(each, None, np.full(each, 1000, dtype=np.int64))
        flipped = FixedUpdate(each, None, -same.values)
        assert _left_out([same, same, same, flipped]) == out
    assert _left_out([same, flipped]) == []  # two cannot outvote each other


def test_who_takes_no_part_is_left_out_after_some_rounds() -> None:
    steady, wild = (100,) * 7, (400, -200) * 3 + (100,)
    for aimless in ((0,) * 7, (-90,) * 7, (5, -80, 60, -20, 5, 40, -10)):
        assert _left_out(_apart(4), [steady, steady, steady, aimless]) == [3]
    # Not: what helps at all, a newcomer, beside others who are new or vary as much themselves.
    assert _left_out(_apart(4), [steady, steady, steady, (40,) * 7]) == []
    assert _left_out(_apart(4), [steady, steady, steady, (0, 0)]) == []
    assert _left_out(_apart(4), [steady, (100,), (100,), (0,) * 7]) == []
    assert _left_out(_apart(4), [wild, wild, wild, (0,) * 7]) == []


def test_a_liar_that_varies_shields_nobody() -> None:
    wild = (900, -900, 900, -900, 900, -900, 0)
    past = [(100,) * 7] * 4 + [wild, (0,) * 7]
    assert _left_out(_apart(6), past) == [4, 5]


# The table: logistic regression on 4 shards, top-k with error feedback, one of four lies.

FEATURES, CLASSES, REPLICAS, ROUNDS = 24, 6, 4, 40
WEIGHTS = FEATURES * CLASSES


def _loss(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    logits = x @ weights.reshape(FEATURES, CLASSES)
    logits -= logits.max(1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    loss = float(-np.log(p[np.arange(len(y)), y] + 1e-12).mean())
    p[np.arange(len(y)), y] -= 1
    return loss, (x.T @ p / len(y)).ravel()


def _lied(update: FixedUpdate, lie: str, rng: np.random.Generator) -> FixedUpdate:
    if lie == "flip":
        return FixedUpdate(WEIGHTS, update.indices, -update.values)
    if lie == "scale":
        large = np.clip(update.values * 100, -VALUE_LIMIT + 1, VALUE_LIMIT - 1)
        return FixedUpdate(WEIGHTS, update.indices, large)
    if lie == "noise":
        assert update.indices is not None
        places = np.sort(rng.choice(WEIGHTS, len(update.indices), replace=False))
        spread = 10 * norm(update) / len(places) ** 0.5
        return FixedUpdate(
            WEIGHTS, places, np.rint(rng.normal(size=len(places)) * spread).astype(int)
        )
    return update


Rule = Callable[[Sequence[FixedUpdate]], FixedUpdate]


def _train(rule: Rule | None, lie: str, seed: int = 0) -> float:
    """Held-out loss of the consensus after some rounds; the last replica lies. With a rule other
    than ours all of every update counts as sent."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(FEATURES, CLASSES))

    def data(count: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(count, FEATURES)) + shift
        return x, np.argmax(x @ truth + rng.gumbel(size=(count, CLASSES)), 1)

    held_out, shards = data(1000, 0.0), [data(600, 0.2 * (i - 1.5)) for i in range(REPLICAS)]
    consensus = np.zeros(WEIGHTS, dtype=np.int32)
    weights = [to_float(consensus) for _ in range(REPLICAS)]
    versions, norms = [consensus.astype(np.int64)], [0]
    past: list[list[int]] = [[] for _ in range(REPLICAS)]
    for _ in range(ROUNDS):
        honest = []
        for i, (x, y) in enumerate(shards):
            w = weights[i].astype(np.float64)
            for _ in range(5):
                batch = rng.integers(0, len(y), 64)
                w -= 0.3 * _loss(w, x[batch], y[batch])[1]
            weights[i] = w.astype(np.float32)
            rest = unsent(weights[i], consensus)
            top = np.sort(np.argsort(-np.abs(rest), kind="stable")[: WEIGHTS // 10])
            honest.append(FixedUpdate(WEIGHTS, top, rest[top]))
        updates = [*honest[:-1], _lied(honest[-1], lie, rng)]
        scales: Sequence[int] = [SCALE_ONE] * REPLICAS
        if rule is not None:
            delta = rule(updates)
        else:
            result = aggregate(
                updates,
                recent_norms=norms[-8:],
                trend=compact(versions[-1] - versions[max(0, len(versions) - 9)]),
                past_scores=[scores[-7:] for scores in past],
            )
            delta, scales = result.delta, result.scales
            norms.append(result.median_norm)
            for scores, score in zip(past, result.scores, strict=True):
                scores.append(score)
        consensus, change = apply_step(consensus, delta)
        versions.append(consensus.astype(np.int64))
        for i in range(REPLICAS):
            learned = change.dense() - scaled(honest[i], scales[i]).dense()
            weights[i] = corrected(weights[i], compact(learned))
    return _loss(to_float(consensus).astype(np.float64), *held_out)[0]


def test_attack_table() -> None:
    """The chosen rule is within 0.05 of the run without a liar, the others are not."""
    lies = ("", "flip", "scale", "noise")
    rules: dict[str, Rule | None] = {
        "ours": None,
        "mean": other_rules.mean,
        "clip": lambda updates: other_rules.mean(other_rules.clipped(updates)),
        "median": lambda updates: other_rules.median(other_rules.clipped(updates)),
    }
    table = {name: [_train(rule, lie) for lie in lies] for name, rule in rules.items()}
    text = "\n".join(f"{name:8}" + " ".join(f"{x:8.3f}" for x in table[name]) for name in table)
    reference = table["mean"][0]
    assert max(table["ours"]) < reference + 0.05, text
    assert abs(table["ours"][0] - reference) < 0.01, text  # little harm to honest updates
    assert max(table["mean"]) > reference + 0.5, text
    assert max(table["clip"]) > max(table["ours"]), text
    assert table["median"][0] > reference + 0.05, text
    print(text)


# --- work: hosts of unequal speed


def shorter(update: FixedUpdate, share: float) -> FixedUpdate:
    return FixedUpdate(update.size, None, (update.values * share).astype(np.int64))


def along(update: FixedUpdate, other: FixedUpdate) -> float:
    """How far `update` goes in the direction of another, in lengths of that."""
    return exact_dot(update.dense(), other.dense()) / other.squared


def test_equal_hosts_are_a_plain_mean() -> None:
    assert work_of([1000, 1000, 1000]) == 3 * WORK_ONE
    assert work_of([]) == 0 and work_of([0, 0]) > 0


@pytest.mark.parametrize("fast", [1, 2, 3, 7])
def test_a_slow_host_takes_nothing_from_the_others(fast: int) -> None:
    """With a tenth of their speed: in a plain mean of two it would halve the other's step."""
    rng = np.random.default_rng(fast)
    way = FixedUpdate(4000, None, rng.integers(-(2**18), 2**18, 4000))
    recent: list[int] = []
    for _ in range(6):
        result = aggregate([*[way] * fast, shorter(way, 0.1)], recent_norms=recent)
        assert along(result.delta, way) > 0.98
        assert WORK_ONE * fast < result.work < WORK_ONE * (fast + 0.2)
        recent.append(result.median_norm)


def test_of_two_the_faster_one_is_the_measure_also_when_norms_grow() -> None:
    rng = np.random.default_rng(0)
    way = FixedUpdate(4000, None, rng.integers(-(2**12), 2**12, 4000))
    recent: list[int] = []
    for number in range(12):
        grown = shorter(way, 1.1**number)
        result = aggregate([grown, shorter(grown, 0.1)], recent_norms=recent)
        assert along(result.delta, grown) > 0.98
        recent.append(result.median_norm)


def test_what_two_can_raise_is_bounded() -> None:
    """A liar beside one honest host: what it may send grows by an eighth a round at most."""
    rng = np.random.default_rng(0)
    way = FixedUpdate(4000, None, rng.integers(-(2**12), 2**12, 4000))
    recent = [norm(way)] * 8
    for _ in range(4):
        result = aggregate([way, shorter(way, -100)], recent_norms=recent)
        recent.append(result.median_norm)
    assert recent[-1] <= norm(way) * 1.125**4 + 4


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=16))
def test_work_is_that_of_one_host_at_least_and_of_all_at_most(norms: list[int]) -> None:
    assert WORK_ONE * (len(norms) // 2) <= work_of(norms) <= WORK_ONE * len(norms)
    if any(norms):
        assert work_of(norms) >= WORK_ONE


def test_who_sends_little_dilutes_nobody() -> None:
    """Half of the senders with short updates halved the others' step before."""
    rng = np.random.default_rng(4)
    way = FixedUpdate(4000, None, rng.integers(-(2**18), 2**18, 4000))
    tiny = [shorter(way, 0.07) for _ in range(3)]
    result = aggregate([*[way] * 4, *tiny], recent_norms=[norm(way)] * 8)
    assert along(result.delta, way) > 0.95


@pytest.mark.parametrize(
    ("part", "same_text", "counts"),
    [
        (1.0, True, True),
        (0.15, True, False),
        (0.0, True, False),
        (-0.5, True, False),
        (1.0, False, True),
        (0.15, False, True),
        (0.0, False, True),
        (-0.5, False, False),
    ],
)
def test_where_texts_may_differ_another_one_is_no_lie(
    part: float, same_text: bool, counts: bool
) -> None:
    """A host with other text shares a part of what the others agree on, or nothing where its pull
    balances theirs, and learns its own besides. So does noise; a flip shares the opposite."""
    rng = np.random.default_rng(7)
    size, steps, recent = 20_000, [], []
    scores: list[list[int]] = [[] for _ in range(4)]
    common, own = rng.normal(size=(2, size)) * 2**14
    left_out = 0
    for _ in range(40):
        updates = []
        for i in range(4):
            share = part if i == 3 else 1.0
            vector = 0.4 * share * common + (0.1 * own if i == 3 and part > 0 else 0)
            vector = vector + rng.normal(size=size) * 2**14
            updates.append(FixedUpdate(size, None, np.rint(vector).astype(np.int64)))
        result = aggregate(
            updates,
            recent_norms=recent[-8:],
            trend=summed([(step, 1) for step in steps[-8:]]) if steps else None,
            past_scores=[one[-7:] for one in scores],
            same_text=same_text,
        )
        steps.append(result.delta)
        recent.append(result.median_norm)
        for one, score in zip(scores, result.scores, strict=True):
            one.append(score)
        assert all(result.scales[:3])
        left_out += result.scales[3] == 0
    assert left_out == 0 if counts else left_out > 30
