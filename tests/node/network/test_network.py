"""A network that goes on: alone if it may, and whatever goes wrong while p2pd is started again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.loopback import (  # noqa: F401
    QUICK,
    RUN_FILE,
    RUN_ID,
    _no_daemon_left,
    daemon_settings,
    node,
    run,
    until,
)

# isort: split
from node.network.network import Network, NetworkSettings
from node.network.service import Status
from protocol import messages
from protocol.identity import load_or_create, new_identity
from protocol.records import Role


@contextlib.asynccontextmanager
async def alone(folder: Path, join: str, said: list[str]) -> AsyncIterator[Network]:
    settings = NetworkSettings(
        daemon_settings(folder, "alone"),
        RUN_ID,
        RUN_FILE,
        (join,),
        check_every_s=0.1,
        backoff=QUICK,
    )
    network = Network(settings, lambda: Status(Role.REPLICA, 0), said.append)
    await network.start(alone_ok=True)
    try:
        yield network
    finally:
        await network.stop()


def test_one_that_may_be_alone_starts_and_joins_when_somebody_is_there(tmp_path: Path) -> None:
    said: list[str] = []

    async def main() -> None:
        async with node(tmp_path, "b") as b:  # its address, before it is there
            port = b.daemon.port
            join = (await b.invitations())[0]
        async with alone(tmp_path, join, said) as network:
            assert "going on alone" in said[0]
            ledger = network.ledger
            async with node(tmp_path, "b", port=port) as b:
                await until(lambda: said[-1] == "peers answer again", 30.0)
                await network.request(b.peer_id, messages.Ping(), messages.Pong)
            assert network.ledger is ledger  # one ledger: nothing is counted twice or lost

    run(main())


def test_an_unforeseen_error_does_not_leave_a_host_without_its_daemon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []

    async def main() -> None:
        async with node(tmp_path, "a", say=said.append) as a, node(tmp_path, "b") as b:
            open_, attach = a._open, a.discovery.join
            failures = iter([RuntimeError("not a wire error"), KeyError("nor this")])

            async def fails(port: int) -> None:
                for failure in failures:
                    raise failure
                await open_(port)

            async def joins(*args: object) -> int:
                a.discovery.join = attach  # type: ignore[method-assign]
                raise ZeroDivisionError

            # In the methods' places, which mypy forbids: failures that no peer of a test can cause.
            a._open = fails  # type: ignore[method-assign]
            a.discovery.join = joins  # type: ignore[method-assign,assignment]
            os.kill(a.daemon.pid, signal.SIGKILL)
            await until(lambda: a.restarts == 1)
            a.discovery.book.remember(b.peer_id, await b.addresses())
            await a.request(b.peer_id, messages.Ping(), messages.Pong)
            assert any("not a wire error" in line for line in said)
            # and it is watched again
            os.kill(a.daemon.pid, signal.SIGKILL)
            await until(lambda: a.restarts == 2)

    run(main())
    assert "joining again failed" in caplog.text


def test_what_else_is_kept_is_saved_with_the_ledger(tmp_path: Path) -> None:
    async def main() -> Path:
        async with node(tmp_path, "a", keep_state=True) as a:
            a.kept.keep("more.json", lambda: b"more")
            assert a.kept.folder is not None
            return a.kept.folder

    folder = run(main())
    assert (folder / "more.json").read_bytes() == b"more"
    assert (folder / "ledger.json").exists() and (folder / "peers.json").exists()


def test_nobody_is_not_joined_through(tmp_path: Path) -> None:
    """An identity that is in use elsewhere is free again after a start that failed."""

    async def main() -> None:
        nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{new_identity().text}"
        async with alone(tmp_path, nobody, []):
            pass

    run(main())
    load_or_create(tmp_path / "alone.key").close()
