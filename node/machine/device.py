"""Which device computes, with how many threads and in which precision.

Decides once, at the start of a process. CUDA, then MPS, then CPU. bf16 autocast only on devices
that compute with it. A CPU that does not is up to 60 times slower with it; one that does trains a
block of width 512 1.3 times as fast (EPYC with avx512_bf16, one thread, 2.2 and 1.6 s a step), and
one of width 128 no faster.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from protocol.errors import UsageError

MAX_THREADS = 1024
CPU_BF16_WIDTH = 512  # from here on, on a CPU, casting costs less than it gains
CPU_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


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


def autocast_dtype(device: torch.device, width: int) -> torch.dtype | None:
    """The precision that a model's forward pass may drop to, or None for fp32 throughout."""
    if device.type == "cpu":
        helps = width >= CPU_BF16_WIDTH and bool(CPU_BF16_FLAGS & _cpu_flags())
        return torch.bfloat16 if helps else None
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):  # the question is about the current one
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has else None


def _cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What Linux says that the CPU can do; nothing elsewhere."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


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
