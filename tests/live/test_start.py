"""A host that is told to leave while it starts: it is gone at once, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.identity import new_identity, peer_text
from swarm.run_template import emit
from tests.support.live import LEAVE_S, Process, children, tiny_run_file
from tests.support.processes import alive, ends

STOPPED = 130


@contextmanager
def started(*arguments: object) -> Iterator[Process]:
    process = Process(*arguments, "--threads", 1)
    try:
        yield process
    finally:
        process.kill()


def test_while_it_looks_for_its_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port, peer = silent.getsockname()[1], peer_text(new_identity().peer_id)
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"
        with started("join", address, "--folder", tmp_path / "host") as host:
            host.until(lambda: {"p2pd", "trainer"} <= host.members().keys())
            family = children(host.pid)
            assert len(family) == 3  # and one that multiprocessing starts
            host.signal(signal.SIGTERM)
            assert ends(host.pid, LEAVE_S)
            assert [kind for pid, kind in family.items() if alive(pid)] == []
            assert host.wait() == STOPPED


def test_while_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what Python unloads in the end: of torch, on a busy machine, 15 s."""
    (tmp_path / "torch.py").write_text(
        "import atexit, os, time\n"
        "atexit.register(time.sleep, 600)\n"
        f"open(os.path.join({str(tmp_path)!r}, f'importing-{{os.getpid()}}'), 'w').close()\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "run.toml").write_bytes(emit(tiny_run_file()))
    with started("seed", tmp_path / "run.toml", "--folder", tmp_path / "host") as host:
        host.until((tmp_path / f"importing-{host.pid}").exists)
        family = children(host.pid)
        host.signal(signal.SIGINT)
        assert ends(host.pid, LEAVE_S)
        assert [kind for pid, kind in family.items() if alive(pid)] == []
        assert host.wait() == STOPPED
