"""Windows of bytes: random ones for training batches, contiguous ones for evaluation.

Training windows are a pure function of a seed and a position. Loading text is in
`node.data.corpus`.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from protocol.errors import DataError

Bytes = npt.NDArray[np.uint8]


def check_window(data: Bytes, window: int, name: str) -> None:
    if window < 1:
        raise DataError(f"a window of {window} bytes predicts nothing", "use at least 1")
    if data.size < window + 1:
        raise DataError(
            f"{name} has {data.size} bytes, but one window of {window} needs {window + 1}",
            "give more text, or a shorter context (--context when it is trained)",
        )


def stream_seed(*parts: int | str) -> int:
    """One seed hashed from several parts, e.g. (run seed, peer id, block)."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class WindowStream:
    """An endless stream of (batch, window + 1) bytes: inputs are [:, :-1], targets [:, 1:].

    Batch i is a pure function of (seed, i): window starts come from a counter-based generator
    keyed by the seed, with i as the upper part of its counter. So resuming at any position is
    free, and hosts with different seeds draw independent streams. Starts are uniform, with
    replacement. Only the generator's raw output is used: numpy guarantees that it is stable
    between versions, unlike `integers()`.
    """

    def __init__(self, data: Bytes, window: int, batch: int, seed: int, name: str = "data") -> None:
        check_window(data, window, name)
        if batch < 1:
            raise DataError(f"a batch of {batch} windows holds nothing", "use at least 1")
        self.batch, self.seed = batch, seed
        # A view with one row per start, of stride 1: picking rows copies only those rows.
        self._windows = np.lib.stride_tricks.sliding_window_view(data, window + 1)

    def batch_at(self, position: int) -> Bytes:
        counter = np.array([0, position, 0, 0], dtype=np.uint64)
        key = np.array([self.seed, 0], dtype=np.uint64)
        raw = np.random.Philox(counter=counter, key=key).random_raw(self.batch)
        # The bias of the remainder is below size / 2**64: negligible.
        starts = (raw % np.uint64(len(self._windows))).astype(np.int64)
        return self._windows[starts]


def evaluation_windows(
    data: Bytes, window: int, limit_bytes: int | None = None, name: str = "data"
) -> Bytes:
    """Contiguous windows from the beginning, as (count, window + 1) bytes, without copying.

    Window k holds the bytes [k * window, (k + 1) * window]: neighbours share one byte, which is the
    last target of one and the first input of the next, so that every byte but the very first is
    predicted exactly once. A target's context is only what precedes it in its window, so CE over
    short windows is a little too high, for every model alike.

    There are enough windows for `limit_bytes` predicted bytes, or as many as the text has. A tail
    shorter than a window is left out.
    """
    check_window(data, window, name)
    count = (data.size - 1) // window
    if limit_bytes is not None:
        count = min(count, max(1, -(-limit_bytes // window)))
    return np.lib.stride_tricks.sliding_window_view(data, window + 1)[::window][:count]
