"""Small plots as inline SVG: lines, bars, and strips of cells by round.

Colours are CSS classes that the page defines for light and dark. All text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 44
MAX_POINTS = 400  # of a line: more cannot be seen
MARKED_POINTS = 40
COLORS = 8
MAX_CELLS = 120  # of a strip
MAX_STRIPS = 64


@dataclass(frozen=True)
class Curve:
    """A line of a chart. `color` is an index into the page's palette; -1 is the colour of text."""

    label: str
    color: int
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def clean(text: str) -> str:
    """Untrusted text made safe for a page: printable, shortened, escaped."""
    cut = text if len(text) <= 300 else text[:299] + "…"
    return escape("".join(c if c.isprintable() else "�" for c in cut))


def byte_unit(largest: float) -> tuple[float, str]:
    """The size and name of the unit for numbers up to this one."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if largest >= size:
            return size, unit
    return 1.0, "bytes"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers within [low, high]."""
    step = 10.0 ** math.floor(math.log10((high - low) / wanted))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= wanted)
    return [
        n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def line_chart(x_label: str, y_label: str, lines: Sequence[Curve]) -> str:
    """Lines over common axes, with a legend; a sentence if there are no points."""
    points = [point for line in lines for point in line.points]
    if not points:
        return '<p class="none">Nothing was measured.</p>'
    x_low, x_high = _range([x for x, _ in points], from_zero=True)
    y_low, y_high = _range([y for _, y in points], from_zero=False)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        up = (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return LEFT + across, HEIGHT - BOTTOM - up

    parts = [_svg_open(WIDTH, HEIGHT, f"{y_label} over {x_label}")]
    for y in ticks(y_low, y_high):
        _, v = at(x_low, y)
        parts.append(f'<path class="grid" d="M{LEFT} {v:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text("tick", LEFT - 6, v + 4, f"{y:g}", "end"))
    for x in ticks(x_low, x_high):
        u, _ = at(x, y_low)
        parts.append(_text("tick", u, HEIGHT - BOTTOM + 16, f"{x:g}", "middle"))
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(_text("label", middle, HEIGHT - 8, x_label, "middle"))
    parts.append(
        f'<text class="label" transform="translate(14 {(HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{clean(y_label)}</text>'
    )
    for line in lines:
        parts.append(_line(line, [at(x, y) for x, y in _thin(line.points)], _thin(line.points)))
    return "".join(parts) + "</svg>" + _legend(lines)


def _line(
    line: Curve, places: Sequence[tuple[float, float]], values: Sequence[tuple[float, float]]
) -> str:
    color = _color(line.color)
    path = "L".join(f"{u:.1f} {v:.1f}" for u, v in places)
    dash = " dashed" if line.dashed else ""
    out = f'<path class="line {color}{dash}" d="M{path}"/>' if len(places) > 1 else ""
    if len(places) <= MARKED_POINTS:
        for (u, v), (x, y) in zip(places, values, strict=True):
            tip = f"{clean(line.label)}: {y:.4g} at {x:.4g}"
            circle = f'<circle class="dot {color}" cx="{u:.1f}" cy="{v:.1f}" r="3">'
            out += f"{circle}<title>{tip}</title></circle>"
    return out


def bar_chart(values: Mapping[str, float], unit: str) -> str:
    """Horizontal bars with their numbers, largest first."""
    shown = sorted(values.items(), key=lambda item: -item[1])
    largest = max((value for _, value in shown), default=0.0)
    if not largest:
        return '<p class="none">No bytes were logged.</p>'
    height = 26 * len(shown) + 8
    room = WIDTH - 80 - 110
    parts = [_svg_open(WIDTH, height, "bars")]
    for index, (name, value) in enumerate(shown):
        y, width = 26 * index + 4, max(1.0, value / largest * room)
        parts.append(_text("label", 74, y + 14, name, "end"))
        parts.append(f'<rect class="bar" x="80" y="{y}" width="{width:.1f}" height="18" rx="2"/>')
        parts.append(_text("tick", 86 + width, y + 14, f"{value:.4g} {unit}", "start"))
    return "".join(parts) + "</svg>"


def strips(rows: Mapping[str, Mapping[int, str]], worst_first: Sequence[str]) -> str:
    """A row for each name with a cell for each round; `rows[name][round]` is its CSS class.

    If there are too many rounds a cell covers several and shows the worst.
    """
    numbers = [number for cells in rows.values() for number in cells]
    if not numbers:
        return '<p class="none">No rounds were logged.</p>'
    first, last = min(numbers), max(numbers)
    each = math.ceil((last - first + 1) / MAX_CELLS)
    count = (last - first) // each + 1
    left, width = 104, 1060
    cell = min(24.0, (width - left) / count)
    shown = list(rows.items())[:MAX_STRIPS]
    height = 20 * len(shown) + 22
    parts = [_svg_open(width, height, "one cell for each round")]
    for index, (name, cells) in enumerate(shown):
        y = 20 * index
        parts.append(_text("label", left - 8, y + 14, name, "end"))
        worst: dict[int, str] = {}
        for number, state in cells.items():
            bin_ = (number - first) // each
            worst[bin_] = min(worst.get(bin_, state), state, key=worst_first.index)
        for bin_, state in sorted(worst.items()):
            rounds = f"round {first + bin_ * each}" + (f" and {each - 1} more" if each > 1 else "")
            parts.append(
                f'<rect class="cell {state}" x="{left + bin_ * cell:.2f}" y="{y + 2}" '
                f'width="{max(1.0, cell - 1):.2f}" height="16"><title>{clean(name)}, {rounds}: '
                f"{state.replace('-', ' ')}</title></rect>"
            )
    for number in {int(n) for n in ticks(first, max(last, first + 1), 10)}:
        x = left + ((number - first) // each + 0.5) * cell
        parts.append(_text("tick", x, height - 5, str(number), "middle"))
    more = (
        "" if len(rows) <= MAX_STRIPS else f'<p class="none">and {len(rows) - MAX_STRIPS} more</p>'
    )
    return "".join(parts) + "</svg>" + more


def _svg_open(width: int, height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{clean(label)}">'


def _text(css: str, x: float, y: float, text: str, anchor: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{css}" {place}>{clean(text)}</text>'


def _color(index: int) -> str:
    return "ink" if index < 0 else f"c{index % COLORS}"


def _legend(lines: Sequence[Curve]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 22 8" class="swatch"><path class="line {_color(line.color)}'
        f'{" dashed" if line.dashed else ""}" d="M0 4H22"/></svg>{clean(line.label)}</li>'
        for line in lines
        if line.points
    )
    return f'<ul class="legend">{items}</ul>'


def _range(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if from_zero:
        return 0.0, high if high > 0 else 1.0
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad, high + pad


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS of the points, always including the last one."""
    every = math.ceil(len(points) / MAX_POINTS)
    return [p for i, p in enumerate(points) if (len(points) - 1 - i) % every == 0] if every else []
