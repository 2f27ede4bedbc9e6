"""Checks of what a topology file says: types, ranges, unknown and missing names, each by name.

Knows nothing of what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from protocol.errors import UsageError

T = TypeVar("T")


class TopologyError(UsageError):
    """A topology file says something that cannot be built."""


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def made(kind: type[T], where: str, values: dict[str, Any]) -> T:
    """A dataclass from a table: no unknown field, every value of its field's type."""
    # `kind` is a dataclass, which a type variable cannot say.
    types = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    only(where, values, *types)
    wanted: dict[str, type] = {"float": float, "int": int, "str": str, "bool": bool}
    checked = {
        name: typed(f"{where}: {name}", value, wanted[types[name]])
        if types[name] in wanted
        else value
        for name, value in values.items()
    }
    return kind(**checked)


def typed(name: str, value: Any, wanted: type[T]) -> T:
    if wanted is float and type(value) is int:
        # T is float here; mypy does not narrow it by `is`.
        return float(value)  # type: ignore[return-value]
    if type(value) is not wanted:
        shown = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
        raise TopologyError(f"{name} is {value!r:.40}", f"it must be {shown[wanted]}")
    return value


def within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is not
        raise TopologyError(f"{name} is {value:g}", f"it must be from {low:g} to {high:g}")


def only(where: str, table: Mapping[str, Any], *allowed: str) -> None:
    for name in table:
        if name not in allowed:
            raise TopologyError(
                f"{where}: unknown field {name[:40]}", f"known are {', '.join(allowed)}"
            )


def table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TopologyError(f"{name} is no table", f"write [{name}]")
    return dict(value)


def tables(name: str, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = table.get(name, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise TopologyError(f"{name} is no list of tables", f"write [[{name}]]")
    return [dict(entry) for entry in found]


def unique(what: str, values: list[str]) -> None:
    twice = {value for value in values if values.count(value) > 1}
    if twice:
        raise TopologyError(f"two hosts have the {what} {min(twice)}", "each needs its own")


def known(names: set[str], wanted: tuple[str, ...], where: str) -> None:
    for name in wanted:
        if name not in names:
            raise TopologyError(f"{where} names {name[:40]}", "there is no such host")
    if len(set(wanted)) != len(wanted):
        raise TopologyError(f"{where} names {wanted[0]} twice", "name each host once")
