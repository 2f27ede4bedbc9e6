"""What is wrong with a table (TOML, JSON) that msgspec refused, in words."""

from __future__ import annotations

import msgspec


def fault(error: msgspec.ValidationError, name: str) -> str:
    """Which field is wrong, and why. `name` is what the table is called."""
    why, _, path = str(error).replace("`", "").partition(" - at $")
    return f"{name}{path}: {why}"
