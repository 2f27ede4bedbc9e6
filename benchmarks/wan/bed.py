"""A test-bed that is up: its hosts, commands that run on them, partitions, counters.

    with Bed(topology_text) as bed:
        bed.start("a", ["python", "-V"]).wait()
        bed.cut(["a"])

Decides how processes on it are started and ended. The packets' way is the forwarder's, a process
of its own that removes everything when this one is gone. Knows nothing of swarms.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any

from benchmarks.harness import ROOT
from benchmarks.wan import namespaces
from benchmarks.wan.forwarder import inner_address, namespace_of
from benchmarks.wan.namespaces import BedFailed
from benchmarks.wan.topology import Topology, parse

LEAVE_S = 20.0


class Bed:
    """The hosts of a topology. Use it with `with`; raises `NoRights` where it cannot be."""

    def __init__(self, text: str) -> None:
        self.topology: Topology = parse(text.encode())
        self._text = text
        self._forwarder: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Bed:
        namespaces.check_rights()
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A shell starts background jobs so, and hosts would inherit it: deaf while they start.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._forwarder = subprocess.Popen(
            [sys.executable, "-m", namespaces.FORWARDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C is for us; it ends when we have ended
        )
        try:
            self._tell(json.dumps(self._text))
        except BaseException:
            # Also Ctrl-C: a forwarder must not be left.
            self._stop_forwarder()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop_processes()
        finally:
            self._stop_forwarder()

    # --- hosts ----------------------------------------------------------------------------------

    def namespace(self, host: str) -> str:
        assert self._forwarder is not None, "the bed is not up"
        return namespace_of(self._forwarder.pid, self.topology.host(host).name)

    def inner_address(self, host: str) -> str:
        """The address that the host itself has: behind NAT another than the world sees."""
        described = self.topology.host(host)
        place = self.topology.hosts.index(described)
        return inner_address(place) if described.nat else described.address

    def start(
        self,
        host: str,
        command: Sequence[str],
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run a command on a host; the pid is the command's own. It ends with the bed, at last."""
        process: subprocess.Popen[bytes] = namespaces.start(
            self.namespace(host),
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **(env or {})},
            cwd=ROOT,
            start_new_session=True,
        )
        self._processes.append(process)
        percent = self.topology.host(host).cpu_percent
        if percent:
            namespaces.limit_cpu(self.namespace(host), process.pid, percent)
        return process

    def stop_processes(self, seconds: float = LEAVE_S) -> list[int]:
        """Ask all of them to leave, at the same time. Whoever stays is killed: their pids."""
        end_s, stayed = time.monotonic() + seconds, []
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.01, end_s - time.monotonic()))
            if process.poll() is None:
                stayed.append(process.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes = []
        return stayed

    # --- the network ----------------------------------------------------------------------------

    def cut(self, apart: Sequence[str]) -> None:
        """Open a partition: these hosts on one side, all others on the other."""
        self._ask(do="cut", apart=list(apart))

    def heal(self) -> None:
        """End all partitions."""
        self._ask(do="heal")

    def set_rtt(self, rtt_ms: float, between: tuple[str, str] | None = None) -> None:
        """Another round-trip time, of one pair or of all. What is under way keeps its own."""
        self._ask(do="delay", rtt_ms=rtt_ms, between=between)

    def counters(self) -> dict[str, dict[str, int]]:
        """What every host's kernel counts of its device and its TCP."""
        names = (host.name for host in self.topology.hosts)
        return {name: namespaces.counters(self.namespace(name)) for name in names}

    def emulated(self) -> dict[str, dict[str, int]]:
        """What became of the packets that every host sent, as the forwarder counts."""
        return self._ask(do="counters")

    # --- the forwarder --------------------------------------------------------------------------

    def _ask(self, **command: Any) -> dict[str, Any]:
        return self._tell(json.dumps(command))

    def _tell(self, line: str) -> dict[str, Any]:
        forwarder = self._forwarder
        assert forwarder is not None and forwarder.stdin is not None
        assert forwarder.stdout is not None
        try:
            forwarder.stdin.write(line.encode() + b"\n")
            forwarder.stdin.flush()
            answer = forwarder.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise BedFailed(
                f"the forwarder ended with code {forwarder.wait()}", "its last lines say why"
            )
        told: dict[str, Any] = json.loads(answer)
        if "error" in told:
            raise BedFailed(str(told["error"]), "it is a mistake of ours")
        return told

    def _stop_forwarder(self) -> None:
        forwarder = self._forwarder
        if forwarder is None:
            return
        assert forwarder.stdin is not None and forwarder.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            forwarder.stdin.close()
        try:
            forwarder.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            forwarder.kill()
            forwarder.wait()
        forwarder.stdout.close()
        self._forwarder = None
        namespaces.clean_stale()
