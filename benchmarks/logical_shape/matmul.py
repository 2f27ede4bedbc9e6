"""Products with weights of two bytes, on whatever CPU there is.

Decides how an fp16 matrix is multiplied, by measuring: as it is, or tile by tile turned into fp32
or bf16 on the way. Which is fastest depends on the CPU and on how many positions go through at
once; every way of serving gets the fastest for its own. Knows nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 2  # so many positions at most are a token's pass; more are a prompt's or an output's
TILE_WEIGHTS = 1 << 20  # turned into another type at a time: tiles stay in the cache
REPEATS = 3


def direct(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.half(), weight).float()


def fp32_tiles(x: Tensor, weight: Tensor) -> Tensor:
    return _tiles(x, weight, torch.float32)


def bf16_tiles(x: Tensor, weight: Tensor) -> Tensor:
    return _tiles(x, weight, torch.bfloat16)


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fp16": direct,
    "fp32 tiles": fp32_tiles,
    "bf16 tiles": bf16_tiles,
}


def _tiles(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    given, (rows, columns) = x.to(dtype), weight.shape
    out = x.new_empty(*x.shape[:-1], rows)
    tile = max(1, min(rows, TILE_WEIGHTS // columns))
    plain = torch.empty(tile, columns)
    for start in range(0, rows, tile):
        part = plain[: min(tile, rows - start)]
        # By way of fp32 also to bf16: torch turns fp16 into bf16 one number at a time.
        part.copy_(weight[start : start + len(part)])
        out[..., start : start + len(part)] = F.linear(given, part.to(dtype))
    return out


@dataclass(frozen=True)
class Ways:
    """The way for a token's pass, and for all others. Names of `WAYS`."""

    few: str = "fp32 tiles"
    many: str = "fp32 tiles"


class HalfLinear(nn.Module):
    """A linear map without bias whose weights are fp16; fp32 goes in and comes out."""

    def __init__(self, weight: Tensor, ways: Ways) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.few, self.many = WAYS[ways.few], WAYS[ways.many]

    def forward(self, x: Tensor) -> Tensor:
        positions = x.numel() // x.shape[-1]
        return (self.few if positions <= FEW else self.many)(x, self.weight)


@torch.no_grad()
def fastest_ways(width: int, positions: int) -> tuple[Ways, dict[str, float]]:
    """The fastest ways on this machine, now, with one thread; and what was measured, in GFLOP/s."""
    rows = max(64, 8 * TILE_WEIGHTS // width)
    weight = torch.randn(rows, width).mul_(width**-0.5).half()
    chosen, measured = [], {}
    for count in (1, positions):
        x = torch.randn(count, width)
        spent_s = {name: _fastest_s(way, x, weight) for name, way in WAYS.items()}
        chosen.append(min(spent_s, key=spent_s.__getitem__))
        for name, seconds in spent_s.items():
            measured[f"{name}, {count} positions"] = 2e-9 * count * rows * width / seconds
    return Ways(*chosen), measured


def _fastest_s(way: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> float:
    best_s = float("inf")
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        way(x, weight)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
