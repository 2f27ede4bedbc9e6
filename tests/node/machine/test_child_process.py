"""A child leaves with a parent that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.support.processes import alive, comes_true

LIMIT_S = 60.0

PARENT = """
import subprocess, sys
from node.machine.child_process import leave_with_parent
child = subprocess.Popen(
    [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"],
    stdout=subprocess.PIPE, text=True, preexec_fn=leave_with_parent,
)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_leaves_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert comes_true(lambda: not alive(child), LIMIT_S)
