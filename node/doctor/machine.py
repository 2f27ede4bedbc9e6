"""The doctor's checks of the machine itself: Python, packages, torch, memory, disk.

torch is tried in a process of its own, since a build for another processor would kill ours.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from node.console.amounts import size_words
from node.doctor.examine import Check
from node.machine import own_packages
from protocol.version import PACKAGE_VERSION

PYTHON = (3, 11)
NEEDS = ("torch", "numpy", "hivemind", "uvloop")  # requirements whose versions matter
SPARE_DISK_BYTES = 1_000_000_000  # beside a host's state: for the corpus, logs, the system
_TORCH = """
import json, sys, torch
product = torch.ones(64, 64) @ torch.ones(64, 64)
assert product[0, 0].item() == 64.0, "a matrix product is wrong"
assert torch.from_numpy(__import__("numpy").ones(2)).sum().item() == 2.0
cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
mps = ["mps"] if torch.backends.mps.is_available() else []
print(json.dumps([torch.__version__, torch.get_num_threads(), cuda + mps]))
"""


def python() -> Check:
    version = platform.python_version()
    wide = sys.maxsize > 2**32
    what = f"{version}, {'64' if wide else '32'} bit, {sys.executable}"
    if sys.version_info[:2] != PYTHON or not wide:
        wanted = ".".join(map(str, PYTHON))
        return Check(
            "python",
            "failed",
            f"{what}: blockswarm needs a 64-bit Python {wanted}",
            (f'python{wanted} -m venv venv; venv/bin/pip install "blockswarm[host]"',),
        )
    return Check("python", "ok", what)


# --- packages -----------------------------------------------------------------------------------


def packages() -> list[Check]:
    return [_ours(), _versions()]


def _ours() -> Check:
    """Whether the three packages are ours, and no other distribution has the same names."""
    for name in own_packages.MARKS:
        found = own_packages.foreign(name)
        if found is not None:
            what = f"`{name}` is not blockswarm's: Python takes it from {found.place}"
            return Check("packages", "failed", what, found.fixes)
    for name in own_packages.MARKS:
        others = own_packages.owners_of(name)
        if others:
            what = f"{', '.join(others)} also brings a package `{name}`; ours is in use now"
            steps = (
                *(f"pip uninstall {o}" for o in others),
                "pip install --force-reinstall --no-deps blockswarm",
            )
            return Check("packages", "warning", what, steps)
    place = Path(own_packages.place_of("node")).parent
    names = ", ".join(own_packages.MARKS)
    return Check("packages", "ok", f"{names} of blockswarm {PACKAGE_VERSION}, in {place}")


def _versions() -> Check:
    """Whether the installed versions meet our distribution's requirements."""
    try:
        from packaging.requirements import Requirement

        wanted = importlib.metadata.requires(own_packages.DISTRIBUTION) or []
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        return Check("versions", "skipped", f"cannot be compared: {error}")
    wrong, right = [], []
    for text in wanted:
        requirement = Requirement(text)
        if requirement.name not in NEEDS:
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": "host"}):
            continue
        try:
            there = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            there = ""
        if there and requirement.specifier.contains(there, prereleases=True):
            right.append(f"{requirement.name} {there}")
        else:
            wrong.append((f"{requirement.name}{requirement.specifier}", there or "missing"))
    if wrong:
        what = "; ".join(f"{needed} is needed, here it is {there}" for needed, there in wrong)
        return Check(
            "versions", "failed", what, tuple(f'pip install "{needed}"' for needed, _ in wrong)
        )
    return Check("versions", "ok", ", ".join(right))


# --- torch --------------------------------------------------------------------------------------


async def torch() -> Check:
    """Import torch and multiply in a child process, which an illegal instruction may kill."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _TORCH,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await child.communicate()
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    reinstall = 'pip install --force-reinstall "torch>=2.6,<2.14" "numpy<2.4"'
    try:
        version, threads, devices = json.loads(out.decode().splitlines()[-1])
    except (ValueError, IndexError):
        code = child.returncode or 0
        last = (err.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        how = f"killed by signal {-code}" if code < 0 else last
        return Check("torch", "failed", f"torch does not work: {how[:200]}", (reinstall,))
    cards = ", ".join(devices) or "no GPU: it trains on the CPU"
    return Check("torch", "ok", f"{version}, {threads} threads, {cards}")


# --- memory and disk ------------------------------------------------------------------------------


def memory_bytes() -> tuple[int, int]:
    """Total and available memory of this machine, or of the container that we run in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    for limit, used in _container_limits():
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return total, free


def _container_limits() -> Iterator[tuple[int, int]]:
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        with suppress(OSError, ValueError):  # "max": no limit
            yield int(Path(limit).read_text()), int(Path(used).read_text())


def memory() -> Check:
    """Which presets fit into memory. Other runs are checked when they start."""
    total, free = memory_bytes()
    needs = _preset_bytes()
    fits = [name for name, (needed, _) in needs.items() if needed <= free]
    sizes = ", ".join(f"{name} {size_words(needed)}" for name, (needed, _) in needs.items())
    what = f"{size_words(free)} free of {size_words(total)} (a block of a preset needs: {sizes})"
    if not fits:
        name, (needed, _) = min(needs.items(), key=lambda item: item[1][0])
        return Check(
            "memory",
            "failed",
            f"no block of any preset fits: {what}",
            (
                f"free {size_words(needed - free)}: end other programs (ps aux --sort=-rss)",
                f"or train a smaller model: blockswarm init --preset {name}, then lower width and "
                "batch in run.toml",
            ),
        )
    return Check("memory", "ok", f"{what}; fits: {', '.join(fits)}")


def _preset_bytes() -> dict[str, tuple[int, int]]:
    """Preset -> memory and disk that a host needs."""
    from swarm.cost import disk_bytes, worker_memory_bytes
    from swarm.run_template import PRESETS, preset

    runs = {name: preset(name, name) for name in PRESETS}
    return {name: (worker_memory_bytes(run), disk_bytes(run, 2)) for name, run in runs.items()}


def disk(folder: Path | None) -> Check:
    """Whether the state folder is writable, can sync files, and has room for a host's state."""
    from node.host.home import state_home

    wanted = folder or state_home()
    there = next(p for p in (wanted.absolute(), *wanted.absolute().parents) if p.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".blockswarm-doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(there).free
    except OSError as error:
        return Check(
            "disk",
            "failed",
            f"cannot write in {there}: {error.strerror}",
            (f"choose another folder: --folder PATH (now: {wanted})", f"or: ls -ld {there}"),
        )
    needs = {name: size for name, (_, size) in _preset_bytes().items()}
    sizes = ", ".join(f"{name} {size_words(size)}" for name, size in needs.items())
    what = f"{size_words(free)} free in {there} (the state of a preset's host takes: {sizes})"
    least = min(needs.values()) + SPARE_DISK_BYTES
    if free < least:
        return Check(
            "disk",
            "failed",
            f"too little: {what}",
            (
                f"free {size_words(least - free)} there, or choose another disk: --folder PATH",
                f"see what takes it: du -xsh {there}/* | sort -h | tail",
            ),
        )
    return Check("disk", "ok", what)
