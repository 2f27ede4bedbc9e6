"""The demo leaves nothing behind, however it ends. Its whole run is `make demo`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import comes_true


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


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_all_processes_are_gone_when_the_demo_is_stopped(tmp_path: Path, how: int) -> None:
    folder = tmp_path.resolve()
    command = [sys.executable, "-m", "node.cli", "demo"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as demo:
        assert comes_true(lambda: len(alive(folder)) > 8, 120)  # hosts, and their p2pd
        demo.send_signal(how)
        demo.wait(60)
    assert comes_true(lambda: not alive(folder), 60)
