"""The allocator is told once; memory is used as before."""

from __future__ import annotations

import subprocess
import sys

from node.machine import memory

SCRIPT = """
import numpy as np
from node.machine.memory import keep_freed_memory
told = keep_freed_memory()
again = keep_freed_memory()
total = sum(int(np.ones(1 << 20).sum()) for _ in range(20))
print(told == again, total == 20 << 20)
"""


def test_a_process_that_keeps_what_it_freed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True"]


def test_memory_of_this_machine() -> None:
    found = memory.available_memory_bytes()
    assert found is None or found > 10**7
