"""What is wrong with this machine, and what to do about it: checks, each bounded in time.

Decides the order of the checks, that one which hangs or fails in an unforeseen way is a failed
check and not the end of the others, and what the list says as a whole. What a check looks at is in
`machine` and `network`. Imports neither torch nor hivemind: both may be what is broken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "warning", "failed", "skipped"]
CHECK_S = 60.0  # none takes longer; torch on a busy machine comes near


@dataclass(frozen=True)
class Check:
    """One finding. `fixes` are steps to try in this order, with this machine's own values."""

    name: str
    state: State
    what: str
    fixes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What a person asks the doctor about: `port` 0 is any, `listen` empty is all interfaces."""

    addresses: tuple[str, ...] = ()
    port: int = 0
    listen: tuple[str, ...] = ()
    folder: Path | None = None  # where a host's state would be


Checker = Callable[[], Awaitable[Check | Sequence[Check]]]


async def bounded(name: str, checker: Checker, limit_s: float = CHECK_S) -> list[Check]:
    """Run one checker; whatever becomes of it is a finding."""
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


async def examine(plan: Plan, hear: Callable[[Check], None] = lambda check: None) -> list[Check]:
    """All checks, each told to `hear` as soon as it and those before it are there."""
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
        return await network.wire(plan)

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
    for name, checker, allowed_s in jobs:  # one by one: they would slow each other down
        for check in await bounded(name, checker, allowed_s):
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
