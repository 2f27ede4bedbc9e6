"""Places and patience: who is turned away, what they are told, and when they come back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.network.gate import Backoff, DaemonGone, Gate, SaidOnce, Unreachable, with_backoff
from protocol.errors import WireError
from protocol.frames import Busy, Deadline, DigestMismatch, Stalled, Truncated
from protocol.limits import BUSY_RETRY_MAX_S


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_places_in_all_and_per_peer() -> None:
    gate = Gate(places=3, per_peer=2, clock=FakeClock())
    with ExitStack() as inside:
        inside.enter_context(gate.enter(b"a"))
        inside.enter_context(gate.enter(b"a"))
        with pytest.raises(Busy), gate.enter(b"a"):
            pass
        inside.enter_context(gate.enter(b"b"))  # one peer cannot take all of them
        for peer in (b"b", b"c"):
            with pytest.raises(Busy), gate.enter(peer):
                pass
        assert gate.inside == 3
    assert gate.inside == 0
    with gate.enter(b"c"):
        assert gate.inside == 1


def test_the_one_furthest_beyond_its_time_loses_its_place_to_who_asks() -> None:
    clock = FakeClock()
    gate = Gate(places=2, per_peer=2, clock=clock)
    gone: list[str] = []
    with ExitStack() as inside:
        for name, fair_s in (("long", 30.0), ("short", 10.0)):
            place = inside.enter_context(gate.enter(b"a"))
            place.fair_for(fair_s, partial(gone.append, name))
        clock.now_s += 9.0
        with pytest.raises(Busy), gate.enter(b"b"):
            pass
        clock.now_s += 100.0  # both are beyond it now, and nobody asks
        assert not gone
        with pytest.raises(Busy), gate.enter(b"a"):  # who has enough gains nothing by asking
            pass
        with gate.enter(b"b"):
            assert gone == ["short"] and gate.inside == 2
            with gate.enter(b"b"):
                assert gone == ["short", "long"] and gate.inside == 2
                with pytest.raises(Busy), gate.enter(b"c"):  # these have no end yet
                    pass
    assert gate.inside == 0 and not gate._inside


def test_a_place_is_free_again_after_any_error() -> None:
    gate = Gate(places=1)
    for error in (ValueError, asyncio.CancelledError):
        with pytest.raises(error), gate.enter(b"a"):
            raise error
        assert gate.inside == 0
    assert not gate._inside  # strangers that came and went are forgotten


def test_retry_after_follows_how_long_transfers_take_and_how_many_wait() -> None:
    clock = FakeClock()
    gate = Gate(places=1, clock=clock)
    for _ in range(40):
        with gate.enter(b"a"):
            clock.now_s += 8.0
    assert gate.retry_after_s() == pytest.approx(8.0, rel=0.01)
    with gate.enter(b"a"):
        told = []
        for _ in range(40):
            with pytest.raises(Busy) as busy, gate.enter(b"b"):
                pass
            told.append(busy.value.retry_after_s)
    assert told == sorted(told) and told[0] > 8.0
    assert told[-1] == BUSY_RETRY_MAX_S  # never beyond what the protocol allows to say


@given(st.integers(0, 10_000), st.integers(0, 2**32))
def test_waits_grow_stay_bounded_and_differ(attempt: int, seed: int) -> None:
    backoff = Backoff(first_s=0.5, most_s=60.0)
    wait_s = backoff.wait_s(attempt, random.Random(seed))
    assert 0.25 <= wait_s <= 60.0
    assert wait_s <= 0.5 * 2 ** min(attempt, 7)
    assert wait_s != backoff.wait_s(attempt, random.Random(seed + 1))


@given(st.floats(0.1, 120.0), st.integers(0, 2**32))
def test_a_busy_peer_is_never_asked_too_early(retry_after_s: float, seed: int) -> None:
    wait_s = Backoff().after(Busy(retry_after_s), 3, random.Random(seed))
    assert retry_after_s <= wait_s <= 1.5 * retry_after_s


def calls(*outcomes: WireError | str) -> tuple[list[int], Callable[[], Awaitable[str]]]:
    left, made = list(outcomes), [0]

    async def call() -> str:
        made[0] += 1
        outcome = left.pop(0)
        if isinstance(outcome, WireError):
            raise outcome
        return outcome

    return made, call


@pytest.mark.parametrize(
    "error", [Busy(0.001), Stalled("x"), Truncated("x"), Unreachable("x"), DaemonGone()]
)
def test_what_may_pass_is_tried_again(error: WireError) -> None:
    made, call = calls(error, error, "done")
    quick = Backoff(first_s=0.001, most_s=0.002)
    result = asyncio.run(with_backoff(call, Deadline.after(5.0), random.Random(0), quick))
    assert result == "done" and made == [3]


def test_what_is_final_is_not_tried_again() -> None:
    made, call = calls(DigestMismatch("x"), "never")
    with pytest.raises(DigestMismatch):
        asyncio.run(with_backoff(call, Deadline.after(5.0), random.Random(0)))
    assert made == [1]


def test_the_deadline_ends_it_without_a_last_wait() -> None:
    clock = FakeClock()
    made, call = calls(Busy(30.0), "never")

    async def main() -> None:
        await with_backoff(call, Deadline(110.0, clock=clock), random.Random(0))

    with pytest.raises(Busy):
        asyncio.run(main())
    assert made == [1]


def test_a_condition_is_said_once_and_its_end_once() -> None:
    lines: list[str] = []
    said = SaidOnce(lines.append)
    said.over("all is well")
    assert not lines
    for _ in range(5):
        said.trouble("nobody answers")
    said.trouble("p2pd is gone")
    said.over("back")
    said.over("back")
    said.trouble("nobody answers")
    assert lines == ["nobody answers", "p2pd is gone", "back", "nobody answers"]
