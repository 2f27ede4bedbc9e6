"""Which device computes, with how many threads and in which precision.

Decides once, at the start of a process. CUDA, then MPS, then CPU; bf16 autocast only on CUDA
devices that have it: on CPUs it was measured between no faster and 60 times slower.
"""

from __future__ import annotations

import os

import torch

from protocol.errors import UsageError


def choose_device(name: str = "auto") -> torch.device:
    """The best device that is there, or the named one; a clear refusal if it is not."""
    have = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, there in have.items() if there))
    if not have.get(name.split(":")[0], False):
        there = ", ".join(kind for kind, yes in have.items() if yes)
        raise UsageError(f"no device {name!r} on this machine", f"use --device {there}, or auto")
    return torch.device(name)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The precision that the forward pass may drop to, or None for fp32 throughout."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return None


def make_deterministic(threads: int | None = None) -> None:
    """Equal seeds give equal bits on one device with one number of threads."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(True, warn_only=True)
    if threads is not None:
        if threads < 1:
            raise UsageError(f"threads is {threads}; it must be at least 1")
        torch.set_num_threads(threads)
