"""Digests of weights and of steps: BLAKE3 over their integers as little-endian int32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

Integers = npt.NDArray[np.signedinteger[Any]]

_INT32 = np.iinfo(np.int32)


def weights_digest(weights: Integers) -> bytes:
    """The digest of a block's consensus weights."""
    state = blake3(b"blockswarm weights 2")
    state.update(len(weights).to_bytes(8, "big"))
    state.update(_little_endian(weights))
    return state.digest()


def step_digest(size: int, indices: Integers | None, values: Integers) -> bytes:
    """The digest of a step on `size` weights; dense if `indices` is None, else sparse."""
    state = blake3(b"blockswarm step 3")
    state.update(size.to_bytes(8, "big"))
    state.update(b"dense" if indices is None else b"sparse")
    for numbers in (indices, values):
        if numbers is not None:
            state.update(_little_endian(numbers))
    return state.digest()


def _little_endian(numbers: Integers) -> memoryview:
    """The numbers as bytes of little-endian int32, which holds every weight, index and value."""
    if numbers.dtype.itemsize > 4 and len(numbers):
        lowest, highest = int(numbers.min()), int(numbers.max())
        if not _INT32.min <= lowest <= highest <= _INT32.max:
            raise ValueError(f"{lowest} to {highest}: no step has such values")
    return np.ascontiguousarray(numbers, dtype="<i4").data.cast("B")
