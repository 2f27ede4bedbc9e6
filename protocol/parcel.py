"""The payload of a sweep and of its result: arrays whose sizes follow from the header alone.

Decides the order and the types of the arrays, and what counts as garbage: another length, a value
that is not finite, log-probabilities that do not normalise. Knows nothing of models.

A sweep: context bytes, drafted bytes, the drafter's log-probabilities, hidden states, state. The
state is the composed log-probability so far, normalised at every hop, so that each receiver can
check it: a constant per position is lost in the final softmax anyway. With `DENOISE` there is z of
every output byte in place of drafts and state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import WireError
from protocol.serving import Mode, Sweep

VOCABULARY = 256
LOG_FLOOR = -1e4  # what a log-probability of 0 travels as: nothing here may be infinite
# A sum of 256 numbers, each rounded: fp16 keeps 11 bits of log-probabilities around -10.
Z_MAX = 1e3  # far beyond any noise: larger ones would overflow beside small sigmas
NORMAL_WITHIN = {np.dtype("<f4"): 1e-3, np.dtype("<f2"): 5e-2}

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.floating[Any]]
Layout = list[tuple[str, tuple[int, ...], np.dtype[Any]]]  # name, shape and type, in order


class Garbage(WireError):
    """Arrays that no honest host computes. Whoever sent them is to be avoided."""


@dataclass(frozen=True)
class Parcel:
    """What travels with a sweep. `drafted`: of each drafted byte, or of all 256 (`VERIFY`)."""

    context: Bytes  # (context,)
    drafts: Bytes | None = None  # (drafts, length); the drafter gets none
    drafted: Floats | None = None  # (drafts, length) or (drafts, length, 256)
    hidden_context: Floats | None = None  # (context, width)
    hidden_drafts: Floats | None = None  # (drafts, length, width)
    state: Floats | None = None  # (drafts, scored, 256)
    z: Floats | None = None  # (length, width), `DENOISE`


def scored_positions(sweep: Sweep) -> int:
    """A verification also predicts the byte after the draft."""
    return sweep.length + (1 if sweep.mode == Mode.VERIFY else 0)


def wide_dtype(sweep: Sweep) -> np.dtype[Any]:
    """Hidden states and state: exact where the result must be, half as many bytes elsewhere."""
    return np.dtype("<f2" if sweep.mode == Mode.ONE_SWEEP else "<f4")


def _layout(sweep: Sweep, width: int) -> Layout:
    """The arrays in a sweep's payload."""
    small, wide = np.dtype("<f4"), wide_dtype(sweep)
    rows, length = sweep.drafts, sweep.length
    parts: Layout = [("context", (sweep.context,), np.dtype("u1"))]
    if sweep.place == 0:
        return parts
    if sweep.mode == Mode.DENOISE:
        parts.append(("z", (length, width), wide))
    else:
        parts.append(("drafts", (rows, length), np.dtype("u1")))
    if sweep.mode == Mode.ONE_SWEEP:
        parts.append(("drafted", (rows, length), small))
    elif sweep.mode == Mode.VERIFY and sweep.temperature > 0:
        parts.append(("drafted", (rows, length, VOCABULARY), small))
    if sweep.hidden:
        parts.append(("hidden_context", (sweep.context, width), wide))
        parts.append(("hidden_drafts", (rows, length, width), wide))
    if sweep.weight > 0 and sweep.mode != Mode.DENOISE:
        parts.append(("state", (rows, scored_positions(sweep), VOCABULARY), wide))
    return parts


def parcel_bytes(sweep: Sweep, width: int) -> int:
    """The only length that a sweep's payload may have."""
    return sum(int(np.prod(shape)) * kind.itemsize for _, shape, kind in _layout(sweep, width))


def pack_parcel(sweep: Sweep, width: int, parcel: Parcel) -> bytes:
    parts = []
    for name, shape, kind in _layout(sweep, width):
        array = np.ascontiguousarray(getattr(parcel, name), dtype=kind)
        assert array.shape == shape, f"{name} is {array.shape}, not {shape}"
        parts.append(array.tobytes())
    return b"".join(parts)


def unpack_parcel(sweep: Sweep, width: int, data: bytes | bytearray) -> Parcel:
    """The arrays, checked. Raises `Garbage`."""
    arrays = _read(_layout(sweep, width), data)
    for name in ("hidden_context", "hidden_drafts"):
        if name in arrays:
            _check_finite(name, arrays[name])
    if "z" in arrays:
        _check_finite("z", arrays["z"])
        if arrays["z"].size and float(np.abs(arrays["z"]).max()) > Z_MAX:
            raise Garbage("z is larger than any noise")
    if "state" in arrays:
        _check_normal("state", arrays["state"])
    drafted = arrays.get("drafted")
    if drafted is not None and sweep.mode == Mode.VERIFY:
        _check_normal("drafted", drafted)
    elif drafted is not None:
        _check_log_probs("drafted", drafted)
    return Parcel(**arrays)


# --- results ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the client gets. Which fields are there follows from what it asked for."""

    drafts: Bytes  # (drafts, length); with DENOISE the output itself
    drafted: Floats | None = None  # as in `Parcel`
    # (drafts, length), of these bytes: composed (ONE_SWEEP), the last block's own (DENOISE)
    scores: Floats | None = None
    best: Bytes | None = None  # (length + 1,): the likeliest byte (VERIFY, greedy)
    best_scores: Floats | None = None  # (length + 1,)
    log_probs: Floats | None = None  # (length + 1, 256): composed (VERIFY, sampling)


def _result_layout(sweep: Sweep) -> Layout:
    rows, length, small = sweep.drafts, sweep.length, np.dtype("<f4")
    parts: Layout = [("drafts", (rows, length), np.dtype("u1"))]
    if sweep.mode == Mode.ONE_SWEEP:
        parts += [("drafted", (rows, length), small), ("scores", (rows, length), small)]
    elif sweep.mode == Mode.DENOISE:
        parts.append(("scores", (rows, length), small))
    elif sweep.temperature > 0:
        parts.append(("drafted", (rows, length, VOCABULARY), small))
        parts.append(("log_probs", (length + 1, VOCABULARY), small))
    else:
        parts.append(("best", (length + 1,), np.dtype("u1")))
        parts.append(("best_scores", (length + 1,), small))
    return parts


def outcome_bytes(sweep: Sweep) -> int:
    return sum(int(np.prod(shape)) * kind.itemsize for _, shape, kind in _result_layout(sweep))


def pack_outcome(sweep: Sweep, outcome: Outcome) -> bytes:
    parts = []
    for name, shape, kind in _result_layout(sweep):
        array = np.ascontiguousarray(getattr(outcome, name), dtype=kind)
        assert array.shape == shape, f"{name} is {array.shape}, not {shape}"
        parts.append(array.tobytes())
    return b"".join(parts)


def unpack_outcome(sweep: Sweep, data: bytes | bytearray) -> Outcome:
    """The result of the sweep that we sent, checked. Raises `Garbage`."""
    arrays = _read(_result_layout(sweep), data)
    if "log_probs" in arrays:
        _check_normal("log_probs", arrays["log_probs"])
        _check_normal("drafted", arrays["drafted"])
    for name in ("scores", "best_scores"):
        if name in arrays:
            _check_log_probs(name, arrays[name])
    if sweep.mode == Mode.ONE_SWEEP:
        _check_log_probs("drafted", arrays["drafted"])
    return Outcome(**arrays)


# --- checks -------------------------------------------------------------------------------------


def _read(layout: Layout, data: bytes | bytearray) -> dict[str, Any]:
    wanted = sum(int(np.prod(shape)) * kind.itemsize for _, shape, kind in layout)
    if len(data) != wanted:
        raise Garbage(f"a payload of {len(data)} bytes, its header says {wanted}")
    arrays, at = {}, 0
    for name, shape, kind in layout:
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(data, kind, count, at).reshape(shape)
        at += count * kind.itemsize
    return arrays


def _check_finite(name: str, array: Floats) -> None:
    if not np.isfinite(array).all():
        raise Garbage(f"{name} has values that are not finite")


def _check_log_probs(name: str, array: Floats) -> None:
    _check_finite(name, array)
    if array.size and float(array.max()) > NORMAL_WITHIN[array.dtype]:
        raise Garbage(f"{name} has probabilities above 1")


def _check_normal(name: str, array: Floats) -> None:
    _check_log_probs(name, array)
    sums = np.exp(array.astype(np.float32)).sum(-1)
    if array.size and float(np.abs(sums - 1.0).max()) > NORMAL_WITHIN[array.dtype]:
        raise Garbage(f"{name} does not normalise")
