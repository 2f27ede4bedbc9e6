"""Dataclasses from tables (TOML, JSON) that a stranger may have written.

msgspec reads them by their annotations; what it leaves open is here.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from protocol.errors import UsageError

T = TypeVar("T")


def from_table(kind: type[T], table: object, name: str) -> T:
    """`table` as a `kind`. Raises `UsageError`, which names the field that is wrong."""
    _refuse_unknown(kind, table, name)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise UsageError(fault(error, name)) from error


def _refuse_unknown(kind: Any, table: object, name: str) -> None:
    """Fields and words that are none: a misspelt option must not pass for one left out."""
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
    """Which field is wrong, and why. `name` is what the table is called."""
    why, _, path = str(error).replace("`", "").partition(" - at $")
    return f"{name}{path}: {why}"
