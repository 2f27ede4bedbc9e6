"""The p2pd child process: what it is told at its start, how its end is noticed, how it is stopped.

Decides the daemon's options (identity, port, interfaces, what it announces, relays) and turns the
ways in which it fails to start into errors with a next step. Knows nothing of who restarts it
(`network.py`) or of what travels through it.

hivemind starts p2pd too, but with its environment for the whole process, no way to pass
`relayDiscovery`, and `is_alive` stays true when the child is dead. Here the child is ours; hivemind
connects to it as to any running daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import platform
import shlex
import shutil
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from node.network import socket_folder
from node.network.addresses import listening_on
from node.network.hivemind_parts import P2P, Multiaddr
from node.network.transport import Transport
from protocol.errors import BlockswarmError
from protocol.identity import peer_from_text

START_S = 20.0  # usually 0.2 to 1.0; a machine under load needs more
STOP_S = 5.0
# p2pd ends by itself so long after its last client is gone: no orphans after kill -9.
ORPHAN_S = 10.0
ALL_INTERFACES = ("0.0.0.0", "::")  # noqa: S104 (a peer that nobody can dial is of little use)
DOCTOR = "blockswarm doctor (looks at p2pd, ports, memory and disk)"
_PORT_ATTEMPTS = 3


class DaemonError(BlockswarmError):
    """p2pd did not start."""


class PortInUse(DaemonError):
    """Another process listens on our port."""


@dataclass(frozen=True)
class DaemonSettings:
    """What p2pd is told. `port` 0: any free one, kept over restarts of the daemon.

    `hosts` are IPs to listen on, none: no listening at all (others reach us over a relay).
    `announce` replaces what the daemon would find out about its own addresses. `relays` are whole
    multiaddresses of peers that may forward for us; `reachability` "private" asks them at once
    instead of finding out first whether we can be dialled.
    """

    identity_path: Path
    port: int = 0
    hosts: tuple[str, ...] = ALL_INTERFACES
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    reachability: Literal["auto", "public", "private"] = "auto"
    map_port: bool = True  # asks the router by UPnP or NAT-PMP

    def options(self, control: Path, hosts: Iterable[str], port: int) -> list[str]:
        """p2pd's command line. Noise alone: one way to be secure, as the spec says."""
        hosts = tuple(hosts)
        listening = listening_on(hosts, port)
        options: dict[str, object] = {
            "listen": f"/unix{control}",
            "id": self.identity_path,
            "dhtServer": 1,  # finds the addresses of peers of which only the id is known
            "noise": 1,
            "tls": 0,
            "connManager": 1,
            "autonat": 1,
            "relay": 1,
            "autoRelay": int(bool(self.relays)),
            "relayDiscovery": 0,  # its search for public relays found none within 12 s
            "natPortMap": int(self.map_port and not all(_is_loopback(h) for h in hosts)),
            "idleTimeout": f"{ORPHAN_S:g}s",
        }
        if listening:
            options["hostAddrs"] = ",".join(listening)
        else:
            options["noListenAddrs"] = 1
        if self.announce:
            options["announceAddrs"] = ",".join(self.announce)
        if self.relays:
            options["trustedRelays"] = ",".join(self.relays)
        if self.reachability != "auto":
            options[f"forceReachability{self.reachability.capitalize()}"] = 1
        return [f"-{name}={value}" for name, value in options.items()]


class Daemon:
    """A running p2pd: its transport, its end, and hivemind's view of it. Made by `start`."""

    def __init__(self, settings: DaemonSettings, folder: Path) -> None:
        self.settings = settings
        self.port = settings.port
        self.peer_id = b""
        self.p2p: Any = None  # hivemind.p2p.P2P, for the DHT
        self._folder = folder
        self._child: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=20)
        self.transport = Transport(folder / socket_folder.CONTROL, folder / socket_folder.INCOMING)

    @classmethod
    async def start(cls, settings: DaemonSettings) -> Daemon:
        """Start p2pd. Raises `DaemonError`; whatever was begun is cleaned up then."""
        for attempt in range(_PORT_ATTEMPTS):
            hosts, port = free_port(settings.hosts, settings.port)
            daemon = cls(settings, socket_folder.make_socket_folder())
            try:
                await daemon._start(hosts, port)
            except PortInUse:
                await daemon.stop()
                if settings.port or attempt == _PORT_ATTEMPTS - 1:
                    raise  # a port that was chosen freely may have been taken since; again
            except BaseException:
                await daemon.stop()
                raise
            else:
                return daemon
        raise AssertionError("the last attempt returns or raises")

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def _start(self, hosts: tuple[str, ...], port: int) -> None:
        self.port = port
        command = [
            _binary(),
            *self.settings.options(self._folder / socket_folder.CONTROL, hosts, port),
        ]
        # Without it two nodes on one port both start, and nodes that join at once fail to dial.
        environment = {**os.environ, "LIBP2P_TCP_REUSEPORT": "false"}
        environment.setdefault("GOLOG_LOG_LEVEL", "error")
        try:
            _check_machine(command[0])
            self._child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours: we say goodbye before the daemon goes
            )
        except OSError as error:
            raise _not_executed(command[0], error) from error
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._drain = asyncio.create_task(self._read_output(ready))
        try:
            async with asyncio.timeout(START_S):
                self.peer_id = peer_from_text(await ready)
                self.p2p = await P2P.replicate(Multiaddr(f"/unix{self._folder / 'control'}"))
        except TimeoutError:
            what = f"p2pd did not start within {START_S:g} s: this machine is busy. {self._said()}"
            raise DaemonError(what, f"the same command again; or {DOCTOR}") from None

    async def _read_output(self, ready: asyncio.Future[str]) -> None:
        """Read to the end: a child whose output is not read stops when the pipe is full."""
        assert self._child is not None and self._child.stdout is not None
        while True:
            try:
                line = await self._child.stdout.readline()
            except ValueError:  # a line longer than the buffer: not one that we look for
                continue
            if not line:
                break
            text = line.decode(errors="replace").strip()
            self._lines.append(text)
            if text.startswith("Peer ID:") and not ready.done():
                ready.set_result(text.removeprefix("Peer ID:").strip())
        if not ready.done():
            code = await self._child.wait()
            if not ready.done():
                ready.set_exception(self._why_not_started(code))

    def _why_not_started(self, code: int) -> DaemonError:
        said = self._said()
        if "address already in use" in said or "failed to listen" in said:
            return port_in_use(self.port)
        what = f"p2pd ended at its start ({_how_it_ended(code)})"
        return DaemonError(f"{what}: {said}" if said else what, DOCTOR)

    def _said(self) -> str:
        return " ".join("".join(c for c in line if c.isprintable()) for line in self._lines)[-400:]

    async def ended(self) -> int:
        """Wait until the child process is gone, however it went; its return code."""
        assert self._child is not None
        return await self._child.wait()

    async def stop(self) -> None:
        """End the child, its tasks and its files. May be called more than once."""
        await self.transport.close()
        if self.p2p is not None:
            await _drop_client(self.p2p)
            self.p2p = None
        if self._child is not None:
            await _end(self._child)
        if self._drain is not None:
            self._drain.cancel()
            await asyncio.gather(self._drain, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()


async def _drop_client(p2p: Any) -> None:
    """Close hivemind's connection to the daemon and wait for the two tasks that it runs."""
    control = p2p._client.control
    tasks = [task for task in (control._read_task, control._write_task) if task is not None]
    await p2p.shutdown()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _not_executed(path: str, error: OSError) -> DaemonError:
    """What the system says when it cannot even begin."""
    reinstall = "pip install --force-reinstall --no-deps hivemind"
    if isinstance(error, PermissionError):
        return DaemonError(
            f"p2pd is not allowed to run: {path} is not executable, or lies on a disk that is "
            "mounted noexec",
            f"chmod +x {shlex.quote(path)}",
        )
    if isinstance(error, FileNotFoundError):
        return DaemonError(f"p2pd is missing: {path}", reinstall)
    if error.errno == errno.ENOEXEC:
        return DaemonError(
            f"p2pd is not a program for this kind of machine ({platform.machine()}): {path}",
            reinstall,
        )
    return DaemonError(f"p2pd cannot be started: {error.strerror}", reinstall)


def _check_machine(path: str) -> None:
    """A program for another machine: uvloop would hand it to a shell, and that talks nonsense."""
    try:
        with open(path, "rb") as program, open(sys.executable, "rb") as python:
            theirs, ours = program.read(20), python.read(20)
    except OSError:
        return  # starting it will say why
    # In ELF files the machine stands at byte 18; a script is for every machine.
    same = theirs[:4] == ours[:4] and theirs[18:20] == ours[18:20]
    if ours[:4] == b"\x7fELF" and not same and theirs[:2] != b"#!":
        raise OSError(errno.ENOEXEC, os.strerror(errno.ENOEXEC))


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    likely = {
        "SIGKILL": ": out of memory, or a program that guards this machine",
        "SIGILL": ": this processor is too old for it",
        "SIGSYS": ": forbidden in this container",
    }
    return f"killed by {name}{likely.get(name, '')}"


def _binary() -> str:
    return str(files("hivemind.hivemind_cli").joinpath("p2pd"))


def port_in_use(port: int) -> PortInUse:
    return PortInUse(
        f"another process listens on port {port}; most likely a blockswarm that still runs",
        f"see which one with: ss -ltnp 'sport = :{port}'; or choose another port, for example "
        f"--port {_unused_port(port)}",
    )


def _unused_port(near: int) -> int:
    """A port above this one that is free now, or 0 (any)."""
    for port in range(near + 1, min(near + 20, 65536)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    return 0


def free_port(hosts: tuple[str, ...], port: int) -> tuple[tuple[str, ...], int]:
    """The hosts that this machine has, and the port, checked to be free on all of them.

    p2pd is content with one of its addresses; a node that lost half of them to another process
    would look alive and be half deaf.
    """
    usable: list[str] = []
    if not 0 <= port < 65536:
        raise DaemonError(f"{port} is not a port", "ports are 1 to 65535; 0 takes any free one")
    with contextlib.ExitStack() as held:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise port_in_use(port) from None
                if error.errno in (errno.EACCES, errno.EPERM):
                    raise DaemonError(
                        f"port {port} is not allowed for this user",
                        "choose one above 1023, for example --port 31337",
                    ) from None
                if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and host == "::":
                    continue  # a machine without IPv6
                raise DaemonError(
                    f"cannot listen on {host}: {error.strerror}",
                    "leave --listen out, or give an IP of this machine (ip -brief address)",
                ) from None
            usable.append(host)
            port = port or probe.getsockname()[1]
    if hosts and not usable:
        raise DaemonError("this machine has none of the addresses to listen on")
    return tuple(usable), port
