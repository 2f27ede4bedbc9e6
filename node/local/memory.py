"""Check whether local training fits into memory, and report running out of memory in one line.

A model that is too large is refused at the start: Linux overcommits memory, and its weights would
be drawn for hours, or the process killed. The estimate counts only what is certainly needed, so it
is on the low side; the memory of swarm hosts is estimated in `swarm.cost`. This module must not
import anything heavy: the command line wraps its commands in `memory_errors_told`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from node.console.amounts import size_words
from protocol.errors import UsageError

if TYPE_CHECKING:
    import torch

    from swarm.run import Run

SMALLER = "a smaller --width, --layers, --blocks or --batch, or free some memory"
FREE_SOME = "close other programs, or use a machine with more memory"
# Messages of torch and the C library; torch has an exception class of its own only for CUDA.
WORDS = ("can't allocate memory", "cannot allocate memory", "out of memory", "alloc_failed")


def training_memory_bytes(run: Run) -> int:
    """Weights, gradients, optimizer, versions and copies of all blocks; activations of one."""
    from swarm.cost import HEAD_FLOATS, LAYER_FLOATS_PER_WIDTH, block_parameters

    shape, training = run.model, run.training
    counts = block_parameters(run)
    matrices = 12 * shape.width**2 * shape.layers if training.optimizer == "muon" else 0
    total = 0
    for block, count in enumerate(counts):
        floats = 4 * count - matrices  # weights, gradients, two moments or one momentum
        total += 4 * (floats + count * (_versions(run) + _copies(run, block)))
    activations = shape.layers * LAYER_FLOATS_PER_WIDTH * shape.width + HEAD_FLOATS
    return total + 4 * activations * training.batch * shape.context


def _versions(run: Run) -> int:
    """How many versions of every block are held at once (`swarm.learning.local.Versions`)."""
    if not run.model.relays:
        return 1
    return min(run.model.blocks, math.ceil(run.training.steps / run.training.steps_per_round))


def _copies(run: Run, block: int) -> int:
    """How many copies of a block the others read: one for each version that is read."""
    if not run.model.relays:
        return 0
    readers = run.model.blocks - 1 - block
    ages = readers if run.training.staggered else min(1, readers)
    return ages + int(run.model.coupling == "look_ahead" and block > 0)


def free_memory_bytes(device: torch.device) -> int | None:
    """The memory that this process can still get on a device; None if unknown."""
    if device.type == "cuda":
        import torch

        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    from node.machine.memory import available_memory_bytes

    found = [size for size in (available_memory_bytes(), _left_of_limit()) if size is not None]
    return min(found, default=None)


def _left_of_limit() -> int | None:
    """What remains of `ulimit -v`, which `available_memory_bytes` does not cover."""
    if not sys.platform.startswith("linux"):
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))
    return limit


def refuse_too_large(run: Run, device: torch.device) -> None:
    needed, there = training_memory_bytes(run), free_memory_bytes(device)
    if there is not None and needed > there:
        raise UsageError(
            f"training this model needs about {size_words(needed)} of memory, "
            f"{size_words(there)} is free here",
            SMALLER,
        )


@contextmanager
def memory_errors_told(hint: str = FREE_SOME) -> Iterator[None]:
    """Turn running out of memory into a `UsageError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError("there is not enough memory for this", hint) from error


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(error).lower() for words in WORDS)
