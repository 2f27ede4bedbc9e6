"""Dataclasses from untrusted tables (TOML, JSON): msgspec, with unknown fields refused."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from protocol.errors import UsageError

T = TypeVar("T")


def from_table(kind: type[T], table: object, name: str) -> T:
    """`table` as a `kind`. Raises `UsageError`, which names the wrong field."""
    _refuse_unknown(kind, table, name)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise UsageError(fault(error, name)) from error


def _refuse_unknown(kind: Any, table: object, name: str) -> None:
    """Refuse unknown fields and words, so that a misspelt option is not silently left out."""
    hints = get_type_hints(kind)
    known = {field.name: hints[field.name] for field in fields(kind)}
    for key, value in table.items() if isinstance(table, dict) else ():
        if key not in known:
            raise UsageError(f"unknown field in {name}: {str(key)[:60]!r}")
        words = get_args(known[key]) if get_origin(known[key]) is Literal else ()
        if words and value not in words:
            raise UsageError(f"{name}.{key} is {value!r}; it must be one of {', '.join(words)}")
        if is_dataclass(known[key]):
            _refuse_unknown(known[key], value, f"{name}.{key}")


def fault(error: msgspec.ValidationError, name: str) -> str:
    """A message with the wrong field and the reason. `name` is that of the table."""
    why, _, path = str(error).replace("`", "").partition(" - at $")
    return f"{name}{path}: {why}"
