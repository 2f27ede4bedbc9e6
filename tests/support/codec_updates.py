"""Every codec as the command line names it, and vectors like real updates, for tests of codecs."""

from __future__ import annotations

import numpy as np

SPECS = [
    "fp32",
    "bf16",
    "int8",
    "int8:16",
    "int4",
    "int4:32",
    "fp32+zstd",
    "bf16+zstd",
    "int8+zstd",
    "int4+zstd",
    "topk:0.01:1",
    "topk:0.01:8",
    "topk:0.02:4",
    "topk:0.02:2",
    "topk:0.1:2:64",
    "topk:1:4:16",
    "topk:0.02:2:overall",
]


def update(size: int, seed: int = 0, scale: float = 1e-3) -> np.ndarray:
    """Like a real update: heavy tails, and a scale per row."""
    random = np.random.default_rng(seed)
    rows = np.exp(0.5 * random.standard_normal(-(-size // 128))).repeat(128)[:size]
    return (random.standard_t(4, size) * rows * scale).astype(np.float32)
