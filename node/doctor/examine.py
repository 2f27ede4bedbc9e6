"""Run the doctor's checks in order, each with a timeout.

A check that hangs or raises counts as failed; the others still run. The checks are in `machine` and
`network`. Must import neither torch nor hivemind: either may be what is broken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "warning", "failed", "skipped"]
CHECK_S = 60.0  # importing torch on a busy machine comes near to it


@dataclass(frozen=True)
class Check:
    """One finding. `fixes` are steps to try in order, with this machine's values filled in."""

    name: str
    state: State
    what: str
    fixes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Examination:
    """A user's options: `port` 0 is any free one, empty `listen` is all interfaces."""

    addresses: tuple[str, ...] = ()
    port: int = 0
    listen: tuple[str, ...] = ()
    folder: Path | None = None  # where a host's state would be


Checker = Callable[[], Awaitable[Check | Sequence[Check]]]


async def within_time(name: str, checker: Checker, limit_s: float = CHECK_S) -> list[Check]:
    """Run one checker with a timeout; its errors become findings."""
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            found = await checker()
    except TimeoutError:
        found = Check(name, "failed", f"took longer than {limit_s:g} s", (_REPORT,))
    except Exception as error:  # a broken library raises what it likes
        found = Check(name, "failed", f"{type(error).__name__}: {error}", (_REPORT,))
    found = [found] if isinstance(found, Check) else list(found)
    taken_s = round(time.monotonic() - began_s, 3)
    return [replace(check, seconds=check.seconds or taken_s) for check in found]


_REPORT = "try again when the machine is idle; if it stays, report it with the output of --json"


async def examine(
    plan: Examination, hear: Callable[[Check], None] = lambda check: None
) -> list[Check]:
    """Run all checks in order; `hear` is called with each result at once."""
    from node.doctor import machine, network

    async def presets() -> Check:
        return await asyncio.to_thread(machine.memory)

    async def disk() -> Check:
        return await asyncio.to_thread(machine.disk, plan.folder)

    async def packages() -> Sequence[Check]:
        return await asyncio.to_thread(machine.packages)

    async def python() -> Check:
        return machine.python()

    async def port() -> Check:
        return await network.port(plan)

    async def wire() -> Sequence[Check]:
        return await network.network_checks(plan)

    limit_s = CHECK_S + network.PEERS_S if plan.addresses else CHECK_S
    jobs: list[tuple[str, Checker, float]] = [
        ("python", python, CHECK_S),
        ("packages", packages, CHECK_S),
        ("torch", machine.torch, CHECK_S),
        ("memory", presets, CHECK_S),
        ("disk", disk, CHECK_S),
        ("port", port, CHECK_S),
        ("p2pd", wire, limit_s),
    ]
    found: list[Check] = []
    for name, checker, allowed_s in jobs:  # not concurrently: they would slow each other down
        for check in await within_time(name, checker, allowed_s):
            found.append(check)
            hear(check)
    return found


def well(checks: Sequence[Check]) -> bool:
    return all(check.state != "failed" for check in checks)


def facts(checks: Sequence[Check]) -> dict[str, Any]:
    """For `--json`."""
    rows = [
        {"name": c.name, "state": c.state, "what": c.what, "fixes": list(c.fixes)}
        | {"seconds": c.seconds}
        for c in checks
    ]
    return {"ok": well(checks), "checks": rows}
