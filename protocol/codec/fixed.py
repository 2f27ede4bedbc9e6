"""The fixed-point numbers that all codecs decode to, and the small floats for scales.

Replicas must aggregate decoded updates to the same bits on any CPU. Float sums depend on order
and on fused operations; integer sums do not. So every decoded value is an integer multiple of one
global quantum, 2^-40, and aggregation works on these integers.

Why 2^-40: an update of 1e-6 per coordinate, quantised to 8 bits, still has a scale of 2^13
quanta, so the grid adds nothing to the codec's own error; the limit of 2^52 quanta is a magnitude
of 4096, far above any weight; 2^52 is exact in a float64; and 2^11 vectors at the limit can be
added in an int64 with no overflow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.codec.errors import NonFiniteError

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Ints = NDArray[np.signedinteger[Any]]  # of either size

FIXED_BITS = 40
QUANTUM = 2.0**-FIXED_BITS
FIXED_LIMIT = 2**52  # in quanta; a larger magnitude is refused by decoders, clipped by encoders
VALUE_LIMIT = FIXED_LIMIT * QUANTUM  # 4096.0

_SEGMENT = 1 << 16  # coordinates per pass: fits into a core's L2 cache with its temporaries


def to_codec_fixed(values: Float32s) -> Int64s:
    """Nearest multiple of the quantum, ties to even, clipped to the limit. Refuses NaN and Inf.

    Exact for magnitudes from 2^-17 up: a float32 has 24 significant bits.
    """
    fixed = np.empty(values.shape, dtype=np.int64)
    for start in range(0, values.size, _SEGMENT):
        # float64 holds x * 2^40 exactly, so rint is the only rounding.
        part = values[start : start + _SEGMENT].astype(np.float64)
        check_finite(part)
        part *= 2.0**FIXED_BITS
        np.rint(part, out=part)
        np.clip(part, -float(FIXED_LIMIT), float(FIXED_LIMIT), out=part)
        fixed[start : start + _SEGMENT] = part
    return fixed


def from_fixed(fixed: Ints) -> Float32s:
    """The nearest float32, ties to even: one rounding in the conversion, none in the product."""
    values = fixed.astype(np.float32)
    values *= np.float32(QUANTUM)
    return values


def check_finite(values: NDArray[Any]) -> None:
    """Refuse NaN and Inf. min and max propagate NaN, so two cheap passes are enough."""
    if values.size and not (values.min() > -np.inf and values.max() < np.inf):
        raise NonFiniteError("the vector contains NaN or Inf")


def check_in_range(values: NDArray[Any]) -> None:
    """Refuse NaN, Inf and magnitudes above the limit."""
    if values.size and not (values.min() >= -VALUE_LIMIT and values.max() <= VALUE_LIMIT):
        raise NonFiniteError(f"a value is NaN, Inf or above {VALUE_LIMIT:g} in magnitude")


def scale_codes(
    quanta: NDArray[np.float64], mantissa_bits: int, code_bits: int, *, up: bool
) -> Int64s:
    """Scales, given in quanta, as small unsigned floats; rounded up, or to the nearest.

    code = (shift << mantissa_bits) + mantissa. Codes below 2^mantissa_bits are the integers
    themselves; above, the mantissa is added with its leading one, so that one that rounds up to the
    next power of two carries into the exponent. Saturates at the largest code. `scale_values` is
    the inverse.
    """
    exponent = np.frexp(quanta)[1].astype(np.int64)
    shift = np.maximum(exponent - (mantissa_bits + 1), 0)
    mantissa = np.ldexp(quanta, -shift)
    mantissa = np.ceil(mantissa) if up else np.rint(mantissa)
    codes: Int64s = (shift << mantissa_bits) + mantissa.astype(np.int64)
    return np.minimum(codes, (1 << code_bits) - 1)


def scale_values(codes: NDArray[Any], mantissa_bits: int) -> Int64s:
    """Scales of codes, in quanta: integers of mantissa_bits + 1 bits, times a power of 2."""
    wide = codes.astype(np.int64)
    shift = np.maximum((wide >> mantissa_bits) - 1, 0)
    values: Int64s = (wide - (shift << mantissa_bits)) << shift
    return values
