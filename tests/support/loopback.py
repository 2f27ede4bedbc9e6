"""Real nodes on loopback for tests: start, wait for conditions, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from node.network.daemon import DaemonSettings
from node.network.gate import Backoff, Gate
from node.network.network import Network, NetworkSettings
from node.network.service import Reply, Status
from protocol import messages
from protocol.frames import content_digest
from protocol.records import Role
from tests.support.processes import comes_true

T = TypeVar("T")

RUN_FILE = b'name = "test"\n'
RUN_ID = content_digest(RUN_FILE)
QUICK = Backoff(first_s=0.05, most_s=0.2)


def run(main: Coroutine[Any, Any, T], limit_s: float = 240.0) -> T:
    """Run on uvloop, with a limit for the whole test; no task, socket or handle may be left.

    pytest makes errors of warnings. uvloop warns of a handle that is open when the loop is closed,
    then closes it; with an error in between it does not, and waits for it for ever. So warnings are
    kept until the loop is closed.
    """

    async def bounded() -> T:
        before = sockets_of_this_process()  # the loop has one of its own
        async with asyncio.timeout(limit_s):
            result = await main
        await nothing_left("tasks", lambda: asyncio.all_tasks() - {asyncio.current_task()})
        await nothing_left("sockets", lambda: sockets_of_this_process() - before)
        return result

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        return runner.run(bounded())
    finally:
        with warnings.catch_warnings(record=True) as left:
            warnings.simplefilter("always")
            runner.close()
        assert not left, f"handles are left: {[str(warning.message) for warning in left]}"


async def nothing_left(kind: str, found: Callable[[], set[Any]]) -> None:
    """What was ended may need some turns of the loop, on a busy machine many of them."""
    try:
        await until(lambda: not found(), 10.0)
    except TimeoutError:
        raise AssertionError(f"{kind} are left: {found()}") from None


def sockets_of_this_process() -> set[str]:
    """All that are open, whoever opened them: the streams to p2pd, hivemind's, the children's."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := os.readlink(entry)).startswith("socket:"):
                found.add(target)
    return found


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for a condition, where tests would else sleep."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_async(
    condition: Callable[[], Coroutine[Any, Any, bool]], limit_s: float = 20.0
) -> None:
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def daemons_of_this_process() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                name, _, rest = (entry / "stat").read_text().rpartition(")")
                state, parent = rest.split()[:2]
                if name.endswith("(p2pd") and int(parent) == os.getpid() and state != "Z":
                    found.add(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def _no_daemon_left() -> Iterator[None]:
    """Imported by every test file that starts p2pd."""
    before = daemons_of_this_process()
    yield
    comes_true(lambda: not daemons_of_this_process() - before, 5.0)
    assert daemons_of_this_process() == before


def daemon_settings(folder: Path, name: str, **changes: Any) -> DaemonSettings:
    values: dict[str, Any] = {"hosts": ("127.0.0.1",), "map_port": False, **changes}
    return DaemonSettings(folder / f"{name}.key", **values)


@contextlib.asynccontextmanager
async def node(
    folder: Path,
    name: str,
    join: tuple[str, ...] | list[str] = (),
    say: Callable[[str], None] = lambda line: None,
    gate: Gate | None = None,
    keep_state: bool = False,
    check_every_s: float = 20.0,
    run_id: bytes = RUN_ID,
    announce: tuple[str, ...] = (),
    **daemon: Any,
) -> AsyncIterator[Network]:
    state = folder / f"{name}.state" if keep_state else None
    if state is not None:
        state.mkdir(exist_ok=True)
    settings = NetworkSettings(
        daemon_settings(folder, name, **daemon),
        run_id,
        RUN_FILE,
        tuple(join),
        announce,
        state,
        check_every_s,
        QUICK,
    )
    network = Network(settings, lambda: Status(Role.REPLICA, 7, (0, 1)), say, gate=gate)
    async with network:
        yield network


@contextlib.asynccontextmanager
async def pair(folder: Path, **changes: Any) -> AsyncIterator[tuple[Network, Network]]:
    """Two nodes that know each other."""
    async with (
        node(folder, "a") as a,
        node(folder, "b", await a.invitations(), **changes) as b,
    ):
        yield a, b


def tell_the_time(network: Network, offset_s: float) -> None:
    """Let a node's clock be off by so much."""
    old = network.service._entries[messages.Hello.KIND].handler

    async def hello(request: messages.Hello, peer_id: bytes) -> Reply:
        reply = await old(request, peer_id)
        assert isinstance(reply.message, messages.HelloReply)
        fields = {**vars(reply.message), "now_s": reply.message.now_s + offset_s}
        return Reply(messages.HelloReply(**fields))

    network.serve(messages.Hello, hello)
