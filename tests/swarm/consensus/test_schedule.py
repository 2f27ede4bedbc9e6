"""The density of every exchange: high near both ends of a run, the codec's own between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import CodecSpec
from swarm.consensus.schedule import CodecSchedule

TOPK = CodecSpec.parse("topk:0.02:2:overall")


def test_the_nth_exchange_from_either_end_sends_its_share() -> None:
    schedule = CodecSchedule(TOPK, count=100, ends_density=0.5)
    assert [schedule.at(n).density for n in (1, 2, 5, 25, 50)] == [0.5, 0.25, 0.1, 0.02, 0.02]
    assert [schedule.at(n).density for n in (100, 99, 96)] == [0.5, 0.25, 0.1]
    assert schedule.at(1).overall and schedule.at(1).value_bits == 2
    assert schedule.densest == schedule.at(1)


def test_what_lies_outside_of_a_run_is_as_dense_as_its_ends() -> None:
    """A stranger's update may name any round: its limit must not depend on that."""
    schedule = CodecSchedule(TOPK, count=10, ends_density=4.0)
    for number in (-5, 0, 1, 10, 11, 10**9):
        assert schedule.at(number).density == 1.0


@pytest.mark.parametrize("codec", ["fp32", "int8", "topk:0.5:2"])
def test_where_there_are_no_ends_every_exchange_is_alike(codec: str) -> None:
    spec = CodecSpec.parse(codec)
    schedule = CodecSchedule.always(codec)
    assert {schedule.at(n) for n in (0, 1, 50)} == {spec}
    assert schedule.mean(lambda one: one.density) == spec.density
    assert CodecSchedule(spec, 10, 0.0).at(1) == spec


@given(
    st.integers(1, 400),
    st.floats(0.001, 1.0),
    st.floats(0.0, 16.0),
)
def test_the_mean_is_that_of_all_exchanges(count: int, density: float, ends: float) -> None:
    spec = CodecSpec.parse(f"topk:{density:.4f}:2")
    schedule = CodecSchedule(spec, count, ends)
    every = [schedule.at(number).density for number in range(1, count + 1)]
    assert all(spec.density <= one <= 1.0 for one in every)
    assert schedule.mean(lambda one: one.density) == pytest.approx(sum(every) / count)
