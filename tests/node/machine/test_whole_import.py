"""Ctrl-C while torch is imported: the process ends, and everything else is as it was.

The torch of these tests is a file that presses Ctrl-C itself: the real one aborts only if it comes
in the wrong moment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

PRESSES = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('went on', flush=True)\n"


def python(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        timeout=60,
    )


def test_an_interrupt_ends_the_process_inside_the_import(tmp_path: Path) -> None:
    """An exception there would be one in torch's C++, which aborts."""
    (tmp_path / "torch.py").write_text(PRESSES)
    guarded = "from node.machine.whole_import import guard_torch; guard_torch(); guard_torch()"
    tried = "\ntry:\n    import torch\nexcept KeyboardInterrupt:\n    print('raised')"
    done = python(tmp_path, guarded + tried)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nstopped\n")
    assert python(tmp_path, tried).stdout == "raised\n", "what it is for"


def test_what_was_begun_is_ended_before(tmp_path: Path) -> None:
    """As by a host, which has a process for training by then."""
    (tmp_path / "torch.py").write_text(PRESSES)
    program = (
        "from node.machine.whole_import import before_stop, guard_torch; guard_torch()\n"
        "from node.trainer import spare_process\n"
        "spare_process.prepare()\n"
        "before_stop(lambda: print('left:', spare_process._spare, flush=True))\n"
        "before_stop(spare_process.leave_none)\n"
        "import torch"
    )
    assert python(tmp_path, program).stdout.splitlines()[-1:] == ["left: None"]


def test_before_and_after_it_is_an_exception_as_ever(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("x = 1\n")
    program = (
        "import os, signal; from node.machine.whole_import import guard_torch; guard_torch()\n"
        "import torch\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    print('not heard')\n"
        "except KeyboardInterrupt:\n    print('raised')"
    )
    assert python(tmp_path, program).stdout == "raised\n"


def test_the_command_is_stopped_and_not_aborted(tmp_path: Path) -> None:
    """Whatever imports torch, here `eval`."""
    (tmp_path / "torch.py").write_text(PRESSES)
    program = "import sys; sys.argv[1:] = ['eval', 'model']; from node.cli import main; main()"
    done = python(tmp_path, program)
    assert done.returncode == 130 and done.stdout == "", done
    assert done.stderr.strip() == "stopped"


def test_torch_is_loaded_by_its_own_loader(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("x = 1\n")
    shown = "print(type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__, torch.x)"
    guarded = (
        "from node.machine.whole_import import guard_torch; guard_torch(); import torch; " + shown
    )
    assert python(tmp_path, guarded).stdout == "SourceFileLoader SourceFileLoader 1\n"
