"""The payload of a sweep and of its result: arrays whose sizes follow from the header alone.

Refused as garbage: another length, values that are not finite, log-probabilities that do not
normalise.

A sweep has context bytes, drafted bytes, the drafter's log-probabilities, hidden states and state.
The state is the composed log-probability so far, normalised at every hop so that each receiver can
check it (the final softmax removes a constant per position anyway). With `DENOISE`, z of every
output byte takes the place of drafts and state.

Over a wide-area line a payload costs a round trip for every doubling of TCP's window, which begins
with about 14 kB, so a one-sweep is kept small. Hidden states, nearly all of it, take 4 bits a
number with a scale for each vector (measured on 8 drafts of 128 bytes: log-probabilities of whole
drafts move by 0.9 nats, where they differ by 8); the drafter's log-probabilities are one sum for
each draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import WireError
from protocol.serving import Mode, Sweep

VOCABULARY = 256
LOG_FLOOR = -1e4  # sent for the logarithm of 0: no value here may be infinite
Z_MAX = 1e3  # far beyond any noise; larger values would overflow with small sigmas
NIBBLE_TOP, NIBBLE_ZERO = 7, 8  # 4-bit codes 1 to 15 stand for -7 to 7 times the vector's scale
# A sum of 256 numbers, each rounded: fp16 keeps 11 bits of log-probabilities around -10.
NORMAL_WITHIN = {np.dtype("<f4"): 1e-3, np.dtype("<f2"): 5e-2}

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.floating[Any]]
Layout = list[tuple[str, tuple[int, ...], np.dtype[Any]]]  # name, shape and type, in order
_HIDDEN, _SCALES = ("hidden_context", "hidden_drafts"), "_scales"


class Garbage(WireError):
    """Arrays that no honest host computes. Their sender is to be avoided."""


@dataclass(frozen=True)
class Parcel:
    """The arrays of a sweep. `drafted`: the drafter's log-probabilities, one sum per draft, or
    (`VERIFY`) of all 256 bytes at each position."""

    context: Bytes  # (context,)
    drafts: Bytes | None = None  # (drafts, length); the drafter gets none
    drafted: Floats | None = None  # (drafts,) or (drafts, length, 256)
    hidden_context: Floats | None = None  # (context, width)
    hidden_drafts: Floats | None = None  # (drafts, length, width)
    state: Floats | None = None  # (drafts, scored, 256)
    z: Floats | None = None  # (length, width), `DENOISE`


def scored_positions(sweep: Sweep) -> int:
    """How many positions a sweep scores: a verification also predicts the byte after the draft."""
    return len(sweep.stretch) + (1 if sweep.mode == Mode.VERIFY else 0)


def _layout(sweep: Sweep, width: int) -> Layout:
    """The arrays in a sweep's payload: fp32 where results must be exact, small in a one-sweep."""
    exact, rough, byte = np.dtype("<f4"), np.dtype("<f2"), np.dtype("u1")
    rows, length, whole = sweep.drafts, len(sweep.stretch), sweep.mode == Mode.ONE_SWEEP
    context = 0 if sweep.part else sweep.context  # it was in the first part
    parts: Layout = [("context", (context,), byte)]
    if sweep.place == 0:
        return parts
    if sweep.mode == Mode.DENOISE:
        parts.append(("z", (length, width), exact))
    else:
        parts.append(("drafts", (rows, length), byte))
    if whole:
        parts.append(("drafted", (rows,), exact))
    elif sweep.mode == Mode.VERIFY and sweep.temperature > 0:
        parts.append(("drafted", (rows, length, VOCABULARY), exact))
    if sweep.hidden:
        for name, shape in zip(_HIDDEN, ((context,), (rows, length)), strict=True):
            if whole:
                parts.append((name + _SCALES, shape, rough))
                parts.append((name, (*shape, (width + 1) // 2), byte))
            else:
                parts.append((name, (*shape, width), exact))
    if sweep.weight > 0 and sweep.mode != Mode.DENOISE:
        kind = rough if whole else exact
        parts.append(("state", (rows, scored_positions(sweep), VOCABULARY), kind))
    return parts


def parcel_bytes(sweep: Sweep, width: int) -> int:
    """The exact length of a sweep's payload."""
    return sum(int(np.prod(shape)) * kind.itemsize for _, shape, kind in _layout(sweep, width))


def pack_parcel(sweep: Sweep, width: int, parcel: Parcel) -> bytes:
    arrays = dict(vars(parcel))
    if sweep.hidden and sweep.mode == Mode.ONE_SWEEP and sweep.place:
        for name in _HIDDEN:
            arrays[name + _SCALES], arrays[name] = to_nibbles(arrays[name])
    return _pack(_layout(sweep, width), arrays)


def _pack(layout: Layout, arrays: dict[str, Any]) -> bytes:
    parts = []
    for name, shape, kind in layout:
        array = np.ascontiguousarray(arrays[name], dtype=kind)
        assert array.shape == shape, f"{name} is {array.shape}, not {shape}"
        parts.append(array.tobytes())
    return b"".join(parts)


def unpack_parcel(sweep: Sweep, width: int, data: bytes | bytearray) -> Parcel:
    """The arrays, checked. Raises `Garbage`."""
    arrays = _read(_layout(sweep, width), data)
    for name in _HIDDEN:
        if name + _SCALES in arrays:
            scales = arrays.pop(name + _SCALES)
            _check_finite(name, scales)
            arrays[name] = from_nibbles(scales, arrays[name], width)
        elif name in arrays:
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


def to_nibbles(vectors: Floats) -> tuple[Floats, Bytes]:
    """Vectors (..., width) as a float16 scale each and 4-bit codes, two a byte, low half first."""
    scales = (np.abs(vectors).max(-1, initial=0.0) / NIBBLE_TOP).astype("<f2")
    divisor = np.where(scales == 0, 1, scales).astype(np.float32)[..., None]
    # Only vectors beyond float16 or not finite give NaN or Inf here; their scale is refused.
    steps = np.nan_to_num(vectors / divisor, posinf=NIBBLE_TOP, neginf=-NIBBLE_TOP)
    codes = np.clip(np.rint(steps), -NIBBLE_TOP, NIBBLE_TOP).astype(np.int8) + NIBBLE_ZERO
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.full_like(codes[..., :1], NIBBLE_ZERO)], -1)
    return scales, (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def from_nibbles(scales: Floats, pairs: Bytes, width: int) -> Floats:
    """The inverse of `to_nibbles`, in float32."""
    shape = (*pairs.shape[:-1], 2 * pairs.shape[-1])
    codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(shape)[..., :width]
    return (codes.astype(np.float32) - NIBBLE_ZERO) * scales.astype(np.float32)[..., None]


# --- results ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of a sweep. Which fields are set follows from the request's mode."""

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
        parts += [("drafted", (rows,), small), ("scores", (rows, length), small)]
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
    return _pack(_result_layout(sweep), vars(outcome))


def unpack_outcome(sweep: Sweep, data: bytes | bytearray) -> Outcome:
    """The result of our sweep, checked. Raises `Garbage`."""
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
