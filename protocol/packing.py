"""Bounded msgpack maps and lists, and the checks of fields in records and message headers.

Well-formed is: one map, text keys, no duplicates, no extension types, no trailing bytes, every
known field of its type and within its limit. Unknown fields are ignored, so that messages of a
newer minor version are understood.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sized
from functools import cache
from typing import Any, TypeVar, cast

import msgpack

from protocol.errors import WireError
from protocol.limits import (
    BLOCK_MAX,
    BLOCK_NONE,
    DIGEST_BYTES,
    LIST_MAX_ITEMS,
    MAP_MAX_FIELDS,
    ROUND_MAX,
    ROW_MAX_COLUMNS,
)

T = TypeVar("T")
Check = Callable[[object], object]


class Malformed(WireError):
    """Bytes that are not what the spec says, or a field outside its limits."""


def pack(value: object) -> bytes:
    return cast(bytes, msgpack.packb(value, use_bin_type=True))


def unpack(
    data: bytes | bytearray | memoryview, max_bytes: int, max_items: int = LIST_MAX_ITEMS
) -> object:
    """Read one msgpack value. Memory is bounded by `max_bytes` and `max_items`.

    Lists need a limit of their own: msgpack allocates a list as soon as it has read its length, and
    thousands of nested lengths fit into a few KB. Text and bytes are allocated once complete.
    """
    if len(data) > max_bytes:
        raise Malformed(f"{len(data)} bytes of msgpack, the limit is {max_bytes}")
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_dict_without_duplicates,
            ext_hook=_refuse_extension,
            max_array_len=max_items,
            max_map_len=MAP_MAX_FIELDS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise Malformed(f"not msgpack as the protocol allows it: {type(error).__name__}") from error


def unpack_map(data: bytes | bytearray | memoryview, max_bytes: int) -> dict[str, object]:
    value = unpack(data, max_bytes)
    if not isinstance(value, dict):
        raise Malformed("expected a msgpack map")
    return cast(dict[str, object], value)


def unpack_rows(
    data: bytes | bytearray | memoryview, max_bytes: int, max_rows: int, *columns: Check
) -> list[list[Any]]:
    """Read a msgpack list of rows of scalars, one check per column. Further columns, of newer minor
    versions, are ignored.

    Read piece by piece, since 500 KB of empty lists would become 30 MB of Python objects.
    """
    if len(data) > max_bytes:
        raise Malformed(f"{len(data)} bytes of msgpack, the limit is {max_bytes}")
    data = bytes(data)
    unpacker = msgpack.Unpacker(raw=False, ext_hook=_refuse_extension, max_buffer_size=max_bytes)
    unpacker.feed(data)
    rows: list[list[Any]] = []
    try:
        row_count = unpacker.read_array_header()
        if row_count > max_rows:
            raise Malformed(f"a list of {row_count}, the limit is {max_rows}")
        for _ in range(row_count):
            width = unpacker.read_array_header()
            if not len(columns) <= width <= ROW_MAX_COLUMNS:
                raise Malformed(f"a row of {width}, expected {len(columns)}")
            rows.append([check(_scalar(unpacker, data)) for check in columns])
            for _ in range(width - len(columns)):
                unpacker.skip()
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise Malformed(f"not a list of rows: {type(error).__name__}") from error
    if unpacker.tell() != len(data):
        raise Malformed("bytes after the end of a list")
    return rows


def _scalar(unpacker: msgpack.Unpacker, data: bytes) -> object:
    mark = data[unpacker.tell() : unpacker.tell() + 1]
    if mark and (0x80 <= mark[0] <= 0x9F or 0xDC <= mark[0] <= 0xDF):
        raise Malformed("a list or map where a single value should be")
    return unpacker.unpack()


def _dict_without_duplicates(pairs: Iterable[tuple[object, object]]) -> dict[str, object]:
    # Of two equal keys some parsers keep the first and some the last: one signature would cover
    # two meanings.
    result: dict[str, object] = {}
    for key, value in pairs:
        if not isinstance(key, str) or key in result:
            raise ValueError("map keys must be distinct text")
        result[key] = value
    return result


def _refuse_extension(code: int, data: bytes) -> object:
    # hivemind decodes extension types of stored values into its own objects.
    raise ValueError(f"extension type {code}")


def bounded(payload: Sized, limit_bytes: int) -> int:
    """The smaller of the limit and the payload's length: msgpack allocates its limit at once."""
    return min(limit_bytes, max(len(payload), 1))


# --- checks of single values --------------------------------------------------------------------


def uint(maximum: int, minimum: int = 0) -> Check:
    def check(value: object) -> int:
        # bool is an int in Python and not in msgpack.
        if not isinstance(value, int) or isinstance(value, bool):
            raise Malformed("expected an integer")
        if not minimum <= value <= maximum:
            raise Malformed(f"{value} is not in {minimum}..{maximum}")
        return int(value)

    return check


def block_id(value: object) -> object:
    """A block's number: 0 to BLOCK_MAX, or BLOCK_NONE."""
    return value if value == BLOCK_NONE and type(value) is int else uint(BLOCK_MAX)(value)


def number(minimum: float, maximum: float) -> Check:
    def check(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise Malformed("expected a number")
        # The order matters: NaN compares false with everything, a huge int has no float.
        if not minimum <= value <= maximum or not math.isfinite(value):
            raise Malformed(f"number is not in {minimum}..{maximum}")
        return float(value)

    return check


def blob(minimum_bytes: int, maximum_bytes: int) -> Check:
    def check(value: object) -> bytes:
        if not isinstance(value, bytes):
            raise Malformed("expected bytes")
        if not minimum_bytes <= len(value) <= maximum_bytes:
            raise Malformed(f"{len(value)} bytes, not {minimum_bytes}..{maximum_bytes}")
        return value

    return check


def digest() -> Check:
    return blob(DIGEST_BYTES, DIGEST_BYTES)


def or_empty(exact: Check) -> Check:
    """Check for bytes that pass `exact` or are empty."""

    def check(value: object) -> object:
        return value if value == b"" and isinstance(value, bytes) else exact(value)

    return check


def digest_or_empty() -> Check:
    return or_empty(digest())


def text(maximum_bytes: int) -> Check:
    def check(value: object) -> str:
        if not isinstance(value, str):
            raise Malformed("expected text")
        if len(value) > maximum_bytes or len(value.encode()) > maximum_bytes:
            raise Malformed(f"text of more than {maximum_bytes} bytes")
        # Text of other peers reaches terminals and logs: no control or escape characters.
        if not value.isprintable():
            raise Malformed("text with characters that cannot be printed")
        return value

    return check


def list_of(item: Check, maximum: int) -> Check:
    def check(value: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple):
            raise Malformed("expected a list")
        if len(value) > maximum:
            raise Malformed(f"a list of {len(value)}, the limit is {maximum}")
        return tuple(item(element) for element in value)

    return check


# Genesis is round -1, and numbers on the wire are never negative: such rounds are sent plus one.


_SENT_ROUND = uint(ROUND_MAX + 1)


def round_sent(number: int) -> int:
    return cast(int, _SENT_ROUND(number + 1))


def round_received(value: object) -> int:
    return cast(int, _SENT_ROUND(value)) - 1


# --- dataclasses as maps ------------------------------------------------------------------------


def wire(
    name: str, check: Check, default: object = dataclasses.MISSING, send: Check | None = None
) -> Any:
    """A dataclass field that is sent as `name`; with a default it may be absent.

    `check` turns what was received into the value, `send` the value into what is sent, if these
    differ.
    """
    metadata = {"name": name, "check": check, "send": send or check}
    return dataclasses.field(default=default, metadata=metadata)


def round_or_genesis(name: str, default: object = dataclasses.MISSING) -> Any:
    """A field for a round, or -1 for genesis."""
    return wire(name, round_received, default, send=lambda value: round_sent(cast(int, value)))


@cache
def _fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def to_map(value: Any) -> dict[str, object]:
    """A dataclass as a map. Defaults are left out, so that a value has exactly one encoding."""
    result: dict[str, object] = {}
    for field in _fields(cast(Any, type(value))):
        item = getattr(value, field.name)
        checked = _checked(field, item, "send")
        if item != field.default:
            result[field.metadata["name"]] = list(checked) if type(checked) is tuple else checked
    return result


def from_map(cls: type[T], fields: dict[str, object]) -> T:
    """A received map as a dataclass. Raises `Malformed`; ignores unknown names."""
    arguments: dict[str, Any] = {}
    for field in _fields(cast(Any, cls)):
        name = field.metadata["name"]
        if name in fields:
            arguments[field.name] = _checked(field, fields[name], "check")
        elif field.default is dataclasses.MISSING:
            raise Malformed(f"{cls.__name__}: field `{name}` ({field.name}) is missing")
    return cls(**arguments)


def _checked(field: dataclasses.Field[Any], value: object, which: str) -> Any:
    try:
        return field.metadata[which](value)
    except Malformed as error:
        raise Malformed(f"field `{field.metadata['name']}` ({field.name}): {error}") from None
