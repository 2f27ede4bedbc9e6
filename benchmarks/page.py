"""What the pages of several benchmarks share: the cells of their tables, a plot in its file.

Knows nothing of any benchmark's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def plot_in(
    path: Path, *grid: int, size: tuple[float, float] = (7, 4.5), **more: Any
) -> Iterator[Any]:
    """Axes to draw on (of a `grid`, an array of them); the file is written at the end."""
    import matplotlib  # slow to import, and only those who make pages need it

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(*grid, figsize=size, **more)
    try:
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)
