"""Which device computes, with how many threads and in which precision.

Decides once, at the start of a process. CUDA, then MPS, then CPU; bf16 autocast only on CUDA
devices that have it: on CPUs it was measured between no faster and 60 times slower.
"""

from __future__ import annotations

import os

import torch

from protocol.errors import UsageError

MAX_THREADS = 1024


def choose_device(name: str = "auto") -> torch.device:
    """The best device that is there, or the named one; a clear refusal if it is not."""
    there = available_devices()
    if name == "auto":
        return torch.device(there[0].split(":")[0])
    # `cuda` is the first CUDA device; the CPU and MPS have no numbers.
    if name not in there and name not in {found.split(":")[0] for found in there}:
        raise UsageError(
            f"no device {name!r} on this machine", f"--device {' or '.join(there)}, or leave it out"
        )
    return torch.device(name)


def available_devices() -> list[str]:
    """Every device that can be named, the best first."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    found = cuda if torch.cuda.is_available() else []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*found, *mps, "cpu"]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The precision that the forward pass may drop to, or None for fp32 throughout."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):  # the question is about the current one
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has else None


def make_deterministic(threads: int | None = None) -> None:
    """Equal seeds give equal bits on one device with one number of threads."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    # The same as use_deterministic_algorithms(True, warn_only=True), which would import torch's
    # compiler, seconds at every start, to tell it as well; nothing here is compiled.
    torch.set_deterministic_debug_mode("warn")
    if threads is not None:
        if not 1 <= threads <= MAX_THREADS:
            raise UsageError(
                f"threads is {threads}; it must be between 1 and {MAX_THREADS}",
                f"--threads {os.cpu_count() or 1}, or leave it out",
            )
        torch.set_num_threads(threads)
