"""Choose the device, the number of threads and the precision, once at the start of a process.

CUDA is preferred, then MPS, then CPU. bf16 autocast is used only where the hardware computes in
bf16. A CPU that does not is up to 60 times slower with it; one that does trains a block of width
512 1.3 times as fast (EPYC with avx512_bf16, one thread, 1.6 instead of 2.2 s a step), and one of
width 128 no faster.
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
    """The best available device, or the named one. Raises `UsageError` if that is not there."""
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
    """All device names that `choose_device` takes, the best first."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    found = cuda if torch.cuda.is_available() else []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*found, *mps, "cpu"]


def autocast_dtype(device: torch.device, width: int) -> torch.dtype | None:
    """The autocast precision for a model of this width, or None for fp32 throughout."""
    if device.type == "cpu":
        helps = width >= CPU_BF16_WIDTH and bool(CPU_BF16_FLAGS & _cpu_flags())
        return torch.bfloat16 if helps else None
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):  # the question is about the current one
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has else None


def _cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The CPU's feature flags on Linux; empty elsewhere."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def make_deterministic(threads: int | None = None) -> None:
    """Make equal seeds give equal bits on one device with one number of threads."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    # The same as use_deterministic_algorithms(True, warn_only=True), which would also import
    # torch's compiler: seconds at every start, and nothing here is compiled.
    torch.set_deterministic_debug_mode("warn")
    if threads is not None:
        if not 1 <= threads <= MAX_THREADS:
            raise UsageError(
                f"threads is {threads}; it must be between 1 and {MAX_THREADS}",
                f"--threads {os.cpu_count() or 1}, or leave it out",
            )
        torch.set_num_threads(threads)
