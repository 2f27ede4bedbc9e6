"""The text form of a codec and its parameters, as in the run file.

    fp32, bf16                 plain floats
    int8, int8:128             blockwise, 256 coordinates per scale unless given
    int4, int4:32              blockwise, 64 coordinates per scale unless given
    topk:0.02:2                the largest 2 % of each chunk, 2 bits per value, chunk of 4096
    topk:0.02:2:16384          the same with another chunk
    topk:0.02:2:overall        the largest 2 % of the whole vector (scales still per 4096)
    int8+zstd                  a dense codec, then zstd on each section that it makes smaller

Top-k always tries zstd, since its sections are small. Dense codecs try it only if asked to: it
costs as much time as the codec itself, and makes payloads 1.07 to 1.24 (int8), 1.14 to 1.38
(int4), 1.18 (fp32) or 1.45 (bf16) times smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import ceil, log2

from protocol.codec.errors import CodecSpecError

MIN_BLOCK, MAX_BLOCK = 16, 65536
VALUE_BITS = (1, 2, 4, 8)
DEFAULT_BLOCK = {"int8": 256, "int4": 64, "topk": 4096}
DEFAULT_CODEC = "topk:0.02:2"
_OVERHEAD_BYTES = 64  # headers, level table, roundings

_HINT = "use fp32, bf16, int8, int4 (with :BLOCK, +zstd) or topk:DENSITY:BITS[:CHUNK or :overall]"


def kept_of(size: int, density: float) -> int:
    """How many of `size` coordinates a density keeps; at least one."""
    return min(size, max(1, round(density * size)))


class CodecId(IntEnum):
    """The codec's number: the second byte of every payload."""

    FP32 = 1
    BF16 = 2
    INT8 = 3
    INT4 = 4
    TOPK = 5


@dataclass(frozen=True)
class CodecSpec:
    """A codec and its parameters, for the encoder. Decoders read them from the payload."""

    codec: CodecId
    block: int = 1  # coordinates per scale (int8, int4) or per chunk (topk); a power of two
    density: float = 1.0  # topk: part of each chunk that is kept
    value_bits: int = 0  # topk: 1, 2, 4 or 8, with the sign
    overall: bool = False  # topk: select from the whole vector instead of from each chunk
    zstd: bool = False

    def __post_init__(self) -> None:
        blockwise = self.codec in (CodecId.INT8, CodecId.INT4, CodecId.TOPK)
        power_of_two = self.block & (self.block - 1) == 0
        if blockwise and not (MIN_BLOCK <= self.block <= MAX_BLOCK and power_of_two):
            raise CodecSpecError(
                f"codec block {self.block} is not a power of two in {MIN_BLOCK}..{MAX_BLOCK}", _HINT
            )
        if self.codec == CodecId.TOPK:
            if not 0.0 < self.density <= 1.0:
                raise CodecSpecError(f"codec density {self.density} is not in (0, 1]", _HINT)
            if self.value_bits not in VALUE_BITS:
                raise CodecSpecError(f"codec value bits {self.value_bits} not in {VALUE_BITS}")

    @classmethod
    def parse(cls, text: str) -> CodecSpec:
        """Read the text form, e.g. "int8" or "topk:0.01:4"."""
        body, plus, suffix = text.partition("+")
        name, *arguments = body.split(":")
        if plus and suffix != "zstd":
            raise CodecSpecError(f"unknown codec {text!r}", _HINT)
        try:
            codec = CodecId[name.upper()] if name == name.lower() else None
            if codec in (CodecId.FP32, CodecId.BF16) and not arguments:
                return cls(codec, zstd=bool(plus))
            if codec in (CodecId.INT8, CodecId.INT4) and len(arguments) <= 1:
                block = int(arguments[0]) if arguments else DEFAULT_BLOCK[name]
                return cls(codec, block, zstd=bool(plus))
            if codec == CodecId.TOPK and len(arguments) in (2, 3) and not plus:
                overall = arguments[2:] == ["overall"]
                named = len(arguments) == 3 and not overall
                chunk = int(arguments[2]) if named else DEFAULT_BLOCK[name]
                density, value_bits = float(arguments[0]), int(arguments[1])
                return cls(codec, chunk, density, value_bits, overall, zstd=True)
        except (KeyError, ValueError) as error:
            raise CodecSpecError(f"unknown codec {text!r}", _HINT) from error
        raise CodecSpecError(f"unknown codec {text!r}", _HINT)

    def max_kept(self, size: int) -> int:
        """Upper bound of the coordinates in an honest payload."""
        if self.codec != CodecId.TOPK:
            return size
        if self.overall:
            return kept_of(size, self.density)
        whole, tail = divmod(size, self.block)
        return whole * kept_of(self.block, self.density) + (tail and kept_of(tail, self.density))

    def max_bytes(self, size: int) -> int:
        """Upper bound of an honest payload's length, to refuse longer ones before pulling."""
        blocks = -(-size // self.block)
        if self.codec == CodecId.TOPK:
            kept = self.max_kept(size)
            low_bits = kept * log2(size / kept + 1)  # more than their shift, see gaps.py
            per_kept = 2 + 1 / 8 + 1 / 4  # gap, level, sign, escapes (64 / 255)
            return _OVERHEAD_BYTES + blocks + ceil(low_bits / 8 + kept * per_kept)
        bits = {CodecId.FP32: 32, CodecId.BF16: 16, CodecId.INT8: 8, CodecId.INT4: 4}[self.codec]
        scales = 0 if bits >= 16 else 2 * blocks
        return _OVERHEAD_BYTES + scales + ceil(size * bits / 8)

    def __str__(self) -> str:
        name = self.codec.name.lower()
        if self.codec == CodecId.TOPK:
            tail = "" if self.block == DEFAULT_BLOCK[name] else f":{self.block}"
            tail = ":overall" if self.overall else tail
            return f"topk:{self.density:g}:{self.value_bits}{tail}"
        tail = "" if self.block == DEFAULT_BLOCK.get(name, 1) else f":{self.block}"
        return name + tail + ("+zstd" if self.zstd else "")
