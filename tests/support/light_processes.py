"""The processes of the light client's tests: a real p2pd, and a client that lacks hivemind.

Neither hivemind nor py-libp2p is imported here: the two cannot share a process, and other tests
need this one for hivemind.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.identity import Identity, peer_text
from tests.support.paths import ROOT

# Part of py-libp2p is compiled: `make` goes on without it where there is no compiler.
needs_libp2p = pytest.mark.skipif(
    importlib.util.find_spec("libp2p") is None, reason="the extra `light` is not installed"
)

SOMEBODY = peer_text(Identity(b"s" * 32).peer_id)


class JsonProcess:
    """A child that speaks one JSON line per line it is told."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(10)}"
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process.stdout.close()


class Server(JsonProcess):
    """A p2pd with our stream handler; until it is told a behaviour, without the handler."""

    def __init__(self, folder: Path) -> None:
        super().__init__("-m", "tests.support.light_server", str(folder))
        told = self.hear()
        self.address, self.peer = told["address"], told["peer"]

    def behave(self, behaviour: str) -> None:
        assert self.tell(behaviour) == {"behaviour": behaviour}
