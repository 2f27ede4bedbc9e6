"""Streams of windows and evaluation windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data.windows import WindowStream, evaluation_windows, stream_seed
from protocol.errors import DataError

COUNTED = (np.arange(100_000) % 251).astype(np.uint8)


def test_stream_is_a_pure_function_of_seed_and_position() -> None:
    stream = WindowStream(COUNTED, window=16, batch=8, seed=3)
    batches = [stream.batch_at(position) for position in range(5)]
    assert batches[0].shape == (8, 17)
    assert batches[0].dtype == np.uint8
    again = WindowStream(COUNTED, window=16, batch=8, seed=3)
    np.testing.assert_array_equal(again.batch_at(10**15), stream.batch_at(10**15))
    np.testing.assert_array_equal(again.batch_at(2), batches[2])
    batches[0][:] = 0  # a batch is the caller's own copy
    assert not np.array_equal(stream.batch_at(0), batches[0])


def test_stream_is_the_same_on_every_host() -> None:
    """Pinned: a change here would change what every run in the world trains on."""
    positions = np.arange(256, dtype=np.uint8)
    stream = WindowStream(positions, window=3, batch=6, seed=42)
    assert stream.batch_at(7)[:, 0].tolist() == PINNED_STARTS
    assert stream_seed(1, "peer", 2) == PINNED_SEED


PINNED_STARTS = [3, 160, 153, 5, 92, 122]
PINNED_SEED = 6558167762873436116


def test_windows_are_contiguous_text_and_cover_it_evenly() -> None:
    data_ = np.arange(64, dtype=np.uint8)
    stream = WindowStream(data_, window=7, batch=1000, seed=1)
    batch = np.concatenate([stream.batch_at(position) for position in range(20)])
    assert (np.diff(batch.astype(int), axis=1) == 1).all()
    counts = np.bincount(batch[:, 0], minlength=64)
    assert (counts[:57] > 0).all()
    assert counts[57:].sum() == 0
    expected = 20_000 / 57
    assert (abs(counts[:57] - expected) < 6 * expected**0.5).all()


def test_hosts_with_different_seeds_draw_different_streams() -> None:
    first = WindowStream(COUNTED, 16, 64, stream_seed(0, "peer a")).batch_at(0)
    second = WindowStream(COUNTED, 16, 64, stream_seed(0, "peer b")).batch_at(0)
    third = WindowStream(COUNTED, 16, 64, stream_seed(0, "peer a")).batch_at(1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, third)
    assert len({stream_seed(*parts) for parts in ((1, 2), (12,), ("1", 2), ("1", "2"))}) == 4


def test_shortest_text_that_holds_a_window() -> None:
    stream = WindowStream(COUNTED[:9], window=8, batch=2, seed=0)
    np.testing.assert_array_equal(stream.batch_at(0), np.stack([COUNTED[:9]] * 2))
    with pytest.raises(DataError, match="valid has 8 bytes, but one window of 8 needs 9"):
        WindowStream(COUNTED[:8], window=8, batch=2, seed=0, name="valid")
    with pytest.raises(DataError, match="needs 9"):
        evaluation_windows(COUNTED[:8], 8)


def test_stream_refuses_nothing_at_all() -> None:
    with pytest.raises(DataError, match="batch of 0"):
        WindowStream(COUNTED, 16, 0, 1)
    with pytest.raises(DataError, match="window of 0"):
        WindowStream(COUNTED, 0, 1, 1)


@given(
    size=st.integers(2, 400),
    window=st.integers(1, 50),
    limit=st.none() | st.integers(0, 500),
)
def test_evaluation_predicts_each_byte_once(size: int, window: int, limit: int | None) -> None:
    text = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    if size < window + 1:
        return
    windows = evaluation_windows(text, window, limit)
    targets = windows[:, 1:].reshape(-1)
    np.testing.assert_array_equal(targets, text[1 : 1 + targets.size])
    np.testing.assert_array_equal(windows[:, :-1].reshape(-1), text[: targets.size])
    available = (size - 1) // window * window
    if limit is None or limit > available:
        assert targets.size == available
    else:
        assert limit <= targets.size < limit + window or targets.size == window
