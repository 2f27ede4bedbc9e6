"""Sizes and durations in words, for all messages to people."""

from __future__ import annotations

from itertools import pairwise

UNITS_S = (("days", 86400), ("h", 3600), ("min", 60), ("s", 1))


def size_words(size_bytes: float) -> str:
    """A size such as "2.5 MB"."""
    from rich.filesize import decimal  # here, so that --help does without it

    return decimal(round(size_bytes))


def duration_words(seconds: float) -> str:
    """A duration in its two largest units: 3 days 2 h, 36 h, 2 min 5 s, 20 min."""
    whole = round(seconds)
    for (unit, size_s), (smaller, part_s) in pairwise(UNITS_S):
        count, rest_s = divmod(whole, size_s)
        if count >= (2 if unit == "days" else 1):
            rest = rest_s // part_s
            return f"{count} {unit} {rest} {smaller}" if rest else f"{count} {unit}"
    return f"{whole} s"
