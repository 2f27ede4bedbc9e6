"""Network namespaces of the test-bed: made, entered, counted, removed, also those of a crashed bed.

Decides the names by which ours are known (`bswan-PID-HOST`, PID being the forwarder's) and that
nothing else is ever touched. A namespace has a loopback and one TUN device, whose other end is the
forwarder: no packet can leave for any real network. Knows nothing of delays.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from protocol.errors import BlockswarmError

PREFIX = "bswan-"
DEVICE = "wan0"
FORWARDER = "benchmarks.wan.forwarder"
SKIPPED = 77  # the exit code that test runners read as: skipped
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PERIOD_US = 20_000
_HEARD: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


class NoRights(BlockswarmError):
    """This machine or user cannot have a test-bed."""


class BedFailed(BlockswarmError):
    """A part of the bed could not be made."""


@contextmanager
def or_skipped() -> Iterator[None]:
    """Where this machine allows no bed, say so and end the process with `SKIPPED`."""
    try:
        yield
    except NoRights as error:
        print(f"skipped: {error.message}\n  try: {error.hint}", file=sys.stderr)
        sys.exit(SKIPPED)


def check_rights() -> None:
    """Raises `NoRights` with what is missing. Tries a namespace and a TUN device."""
    if not sys.platform.startswith("linux"):
        raise NoRights("network namespaces exist on Linux only", "run it in a Linux machine")
    if shutil.which("ip") is None:
        raise NoRights("the command ip is missing", "install iproute2")
    if os.geteuid() != 0:
        raise NoRights("only root may make network namespaces", "run it as root, or in a container")
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        fd = open_tun(f"bsp{os.getpid()}")
        try:
            ip("netns", "add", probe)
        finally:
            os.close(fd)
    except (OSError, BedFailed) as error:
        raise NoRights(
            f"this machine allows no namespaces or TUN devices ({error})",
            "a container needs --privileged, or CAP_NET_ADMIN, CAP_SYS_ADMIN and /dev/net/tun",
        ) from error
    finally:
        remove(probe)


def open_tun(name: str) -> int:
    """A new TUN device in our own namespace. It lives as long as this descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(fd, _TUNSETIFF, request)
    except OSError:
        os.close(fd)
        raise
    return fd


def build(name: str, device: str, address: str, mtu: int) -> None:
    """A namespace with one way out, the TUN device. TCP is cubic on it, as on an ordinary host.

    The congestion control is set on the route: the namespace's sysctl refuses what the machine
    does not list as allowed for everybody, and that list is the machine's.
    """
    ip("netns", "add", name)
    ip("link", "set", device, "netns", name)
    ip("-n", name, "link", "set", device, "name", DEVICE)
    ip("-n", name, "link", "set", "lo", "up")
    quiet = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
    inside(name, "sh", "-c", f"[ ! -e {quiet} ] || echo 1 > {quiet}")
    ip("-n", name, "link", "set", DEVICE, "mtu", str(mtu), "txqueuelen", "1000", "up")
    ip("-n", name, "addr", "add", f"{address}/32", "dev", DEVICE)
    ip("-n", name, "route", "add", "default", "dev", DEVICE, "congctl", "cubic")


def start(name: str, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
    """Start a command in a namespace; `how` is what `Popen` takes.

    A thread of ours enters the namespace and the process is born there. One that entered by itself
    (as with nsenter) could be held up until `remove` has looked for processes, and nobody would
    ever end it. The thread ends here; the others of this process stay where they are.
    """

    def born_there() -> subprocess.Popen[Any]:
        _enter(name)
        return subprocess.Popen(list(command), **how)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(born_there).result()


def _enter(name: str) -> None:
    """Move this thread, and what it will start, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)  # Python 3.11 has no os.setns
    try:
        with open(f"/run/netns/{name}", "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError as error:
        raise BedFailed(f"{name} cannot be entered: {error}", "run it as root on Linux") from error


def inside(name: str, *command: str) -> str:
    """What a short command in a namespace prints."""
    return _said(command, start(name, command, **_HEARD))


def counters(name: str) -> dict[str, int]:
    """What the kernel of the host counts: bytes and packets of its device, TCP segments resent.

    `tx` is what the host sent, `rx` what reached it. Headers of IP and TCP are included.
    """
    text = inside(name, "cat", "/proc/net/dev", "/proc/net/snmp")
    found: dict[str, int] = {}
    names: list[str] = []
    for line in text.splitlines():
        start, _, rest = line.partition(":")
        values = rest.split()
        if start.strip() == DEVICE:
            numbers = [int(value) for value in values]
            found |= {"rx_bytes": numbers[0], "rx_packets": numbers[1]}
            found |= {"tx_bytes": numbers[8], "tx_packets": numbers[9]}
        elif start == "Tcp" and not names:
            names = values
        elif start == "Tcp":
            tcp = dict(zip(names, map(int, values), strict=True))
            found |= {"tcp_segments": tcp["OutSegs"], "tcp_resent": tcp["RetransSegs"]}
    return found


def ours() -> list[str]:
    """The names of all namespaces that a bed made."""
    with suppress(BedFailed, FileNotFoundError):
        lines = ip("netns", "list").splitlines()
        return [line.split()[0] for line in lines if line.startswith(PREFIX)]
    return []


def clean_stale() -> list[str]:
    """Remove what crashed beds left; the names. A bed that is up is left alone."""
    removed = []
    for name in ours():
        owner = name.removeprefix(PREFIX).partition("-")[0]
        if not _is_bed(owner):
            remove(name)
            removed.append(name)
    return removed


def _is_bed(pid: str) -> bool:
    with suppress(OSError):
        words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        return FORWARDER.encode() in words or any(
            b"benchmarks" in w or b"pytest" in w for w in words
        )
    return False


def remove(name: str) -> None:
    """End every process in a namespace of ours, then the namespace."""
    assert name.startswith(PREFIX)
    if not Path("/run/netns", name).exists():
        return
    end_s = time.monotonic() + 5.0
    while (found := pids(name)) and time.monotonic() < end_s:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Until the kernel has let go of them; 5 s at most.
        time.sleep(0.02)
    with suppress(BedFailed):
        ip("netns", "del", name)
    with suppress(OSError):
        cpu_group(name).rmdir()


def pids(name: str) -> list[int]:
    """The processes in a namespace."""
    with suppress(BedFailed):
        return [int(word) for word in ip("netns", "pids", name).split()]
    return []


def limit_cpu(name: str, pid: int, percent: float) -> None:
    """Let a process and its children have so much of one core. The group goes with the namespace.

    One group per namespace: workers of a host share it, so `percent` is the host's.
    """
    group, quota_us = cpu_group(name), max(1000, int(_PERIOD_US * percent / 100))
    try:
        group.mkdir(exist_ok=True)
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise NoRights(
            f"this machine cannot slow a process down ({error.strerror})",
            "leave cpu_percent out of the topology",
        ) from error


def cpu_group(name: str) -> Path:
    """Of cgroup v1 if its cpu controller is mounted, else of v2."""
    base = Path("/sys/fs/cgroup")
    return (base / "cpu" if (base / "cpu").is_dir() else base) / name


def ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    return _said(command, subprocess.Popen(command, **_HEARD))


def _said(command: Sequence[str], process: subprocess.Popen[str]) -> str:
    """What the process of a command prints until its end."""
    with process:
        out, err = process.communicate()
    if process.returncode:
        said = err.strip() or f"exit code {process.returncode}"
        raise BedFailed(f"{' '.join(command)}: {said}", "run it as root on Linux")
    return out
