"""The demo leaves nothing behind, however it ends. Its whole run is `make demo`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def alive(folder: Path) -> list[str]:
    """Processes that work in the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder and (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def wait_for(condition: object, limit_s: float) -> bool:
    assert callable(condition)
    end_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.1)  # between two looks at a condition
    return bool(condition())


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_all_processes_are_gone_when_the_demo_is_stopped(tmp_path: Path, how: int) -> None:
    folder = tmp_path.resolve()
    command = [sys.executable, "-m", "node.cli", "demo"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as demo:
        assert wait_for(lambda: len(alive(folder)) > 8, 120)  # hosts, and their p2pd
        demo.send_signal(how)
        demo.wait(60)
    assert wait_for(lambda: not alive(folder), 60)
