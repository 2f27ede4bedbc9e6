"""The process that trains, started early: it waits, takes one order, and is never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from node.trainer import spare_process
from node.trainer.process import shared_bytes, shared_weights
from tests.support.processes import alive, comes_true

LIMIT_S = 90.0


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    spare_process.discard()


def test_a_spare_is_taken_once() -> None:
    spare_process.prepare()
    spare_process.prepare()  # one is enough
    first = spare_process.take()
    second = spare_process.take()
    assert first[0].pid != second[0].pid and first[0].is_alive() and second[0].is_alive()
    second[0].kill()
    second[0].join(LIMIT_S)
    first[1].close()  # nobody wants it: it ends by itself
    first[0].join(LIMIT_S)
    assert first[0].exitcode == 0
    second[1].close()


def test_a_dead_spare_is_replaced() -> None:
    spare_process.prepare()
    started = spare_process._spare
    assert started is not None and started[0].pid is not None
    dead = started[0].pid
    os.kill(dead, signal.SIGKILL)
    started[0].join(LIMIT_S)
    process, connection = spare_process.take()
    assert process.pid != dead and process.is_alive()
    connection.close()
    process.kill()
    process.join(LIMIT_S)


def test_the_shared_memory_is_the_same_on_both_sides() -> None:
    sizes = {0: 5, 2: 7}
    fd, memory = spare_process.anonymous_memory(shared_bytes(10, sizes))
    try:
        ours = shared_weights(memory, 10, sizes)
        import mmap

        theirs = shared_weights(mmap.mmap(fd, 0), 10, sizes)
        ours.own[:] = 1.0
        ours.copies[2][:] = np.arange(7)
        assert theirs.own.tolist() == [1.0] * 10
        assert theirs.copies[2].tolist() == list(range(7)) and theirs.copies[0].sum() == 0
    finally:
        os.close(fd)


OWNER = (
    "from node.trainer import spare_process as s; import time\n"
    "if __name__ == '__main__':\n"
    "    s.prepare(); print(s._spare[0].pid, flush=True); time.sleep(600)\n"
)


def test_a_spare_ends_with_its_killed_owner_also_while_it_imports(tmp_path: Path) -> None:
    """On a busy machine importing torch takes half a minute, and nobody looks at the pipe."""
    importing = tmp_path / "importing"
    endless = f"import time\nopen({str(importing)!r}, 'w').close()\ntime.sleep(600)\n"
    (tmp_path / "torch.py").write_text(endless)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    try:
        assert comes_true(importing.exists, LIMIT_S)
        assert alive(pid)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    try:
        assert comes_true(lambda: not alive(pid), 10.0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
