"""Why a tensor payload is refused. Every error here means: the sender's bytes break the spec.

WireError
└── CodecError
    ├── CodecVersionError       another codec version
    ├── UnknownCodecError       a codec id or a parameter that this version does not have
    ├── SizeMismatchError       the payload declares another number of coordinates than expected
    ├── TruncatedPayloadError   fewer bytes than the header declares
    ├── TrailingBytesError      more bytes than the header declares
    ├── CompressionError        a zstd frame that is damaged, oversized or undeclared
    ├── NonFiniteError          NaN, Inf, or a magnitude above the limit
    └── CorruptPayloadError     bits that no encoder writes (indices, padding, reserved bits)
"""

from __future__ import annotations

from protocol.errors import UsageError, WireError


class CodecError(WireError):
    """A tensor payload that we refuse."""


class CodecVersionError(CodecError):
    """Written for another version of the codecs."""


class UnknownCodecError(CodecError):
    """A codec id or a parameter that this version does not have."""


class SizeMismatchError(CodecError):
    """The declared number of coordinates is not the expected one."""


class TruncatedPayloadError(CodecError):
    """Fewer bytes than declared."""


class TrailingBytesError(CodecError):
    """More bytes than declared."""


class CompressionError(CodecError):
    """A zstd frame that is damaged, declares no size, or declares a wrong one."""


class NonFiniteError(CodecError):
    """NaN, Inf, or a magnitude above the limit of the fixed-point range."""


class CorruptPayloadError(CodecError):
    """Bits that no encoder writes."""


class CodecSpecError(UsageError):
    """A codec's text form (in the run file) that cannot be read."""
