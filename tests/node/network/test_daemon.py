"""p2pd's life: started as told, missed when it dies, started again, and clear errors otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from node.network.addresses import is_relayed, split_peer, through_relay
from node.network.daemon import Daemon, DaemonError, PortInUse, free_port
from node.network.network import Network, NobodyThere
from protocol import messages
from protocol.errors import IdentityError
from protocol.frames import Deadline
from protocol.identity import load_or_create, new_identity
from protocol.records import Record, Role
from tests.support.loopback import (  # noqa: F401
    RUN_ID,
    _no_daemon_left,
    daemon_settings,
    node,
    run,
    until,
    until_async,
)

RECORD = Record(run=RUN_ID, role=Role.REPLICA, block=1, round=1, sequence=0)


async def asks(asker: Network, answerer: Network) -> bool:
    pong = await asker.request_patiently(answerer.peer_id, messages.Ping(), messages.Pong, 20.0)
    return pong.message is not None


def test_a_killed_daemon_is_started_again_and_the_node_goes_on(tmp_path: Path) -> None:
    said: list[str] = []

    async def main() -> None:
        async with (
            node(tmp_path, "seed") as seed,
            node(tmp_path, "a", await seed.invitations(), say=said.append) as a,
            node(tmp_path, "b", await seed.invitations()) as b,
        ):
            await a.announce(RECORD)
            await b.replicas(1)  # b knows a's address from its record
            pid, port, peer_id = a.daemon.pid, a.daemon.port, a.peer_id
            before = a.discovery.stored_records
            os.kill(pid, signal.SIGKILL)
            await until(lambda: a.restarts == 1)
            assert a.daemon.pid != pid
            assert (a.daemon.port, a.daemon.peer_id) == (port, peer_id)
            assert a.discovery.stored_records >= before > 0  # what it held for others
            assert await asks(a, seed)
            assert await asks(b, a)
            await until(lambda: len(said) == 2)
            assert "p2pd has ended (code -9)" in said[0] and "runs again" in said[1]
            assert len(await b.replicas(1)) == 1
            # and once more: it is watched again
            os.kill(a.daemon.pid, signal.SIGTERM)
            await until(lambda: a.restarts == 2)
            assert await asks(b, a)

    run(main())


def test_rejoins_through_cached_peers_when_the_seed_is_gone_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as swarm:
            seed = await swarm.enter_async_context(node(tmp_path, "b"))
            async with node(tmp_path, "seed", await seed.invitations()) as gone:
                await seed.announce(RECORD)
                join = await gone.invitations()
                async with node(tmp_path, "a", join, keep_state=True) as a:
                    assert len(await a.replicas(1)) == 1
            # `gone` has ended; a comes back, knows only it by name and b from its cache
            async with node(tmp_path, "a", join, keep_state=True) as a:
                assert await asks(a, seed)
                os.kill(a.daemon.pid, signal.SIGKILL)
                await until(lambda: a.restarts == 1)
                assert len(await a.replicas(1)) == 1

    run(main())


def test_a_lost_network_is_said_once_and_healed(tmp_path: Path) -> None:
    said: list[str] = []

    async def main() -> None:
        async with contextlib.AsyncExitStack() as other:
            b = await other.enter_async_context(node(tmp_path, "b"))
            port, join = b.daemon.port, await b.invitations()
            async with node(tmp_path, "a", join, say=said.append, check_every_s=0.1) as a:
                assert await asks(a, b)
                await other.aclose()
                tried = 0
                connect = a.transport.connect

                async def counted(*args: Any) -> None:
                    nonlocal tried
                    tried += 1
                    await connect(*args)

                # In the method's place, which mypy forbids: how often it is tried shows nowhere.
                a.transport.connect = counted  # type: ignore[method-assign,assignment]
                await until(lambda: tried >= 5, 30.0)
                assert said == ["no peer answers; training goes on, trying to join again"]
                async with node(tmp_path, "b", port=port) as b:
                    await until(lambda: len(said) == 2)
                    assert said[1] == "peers answer again"
                    assert await asks(a, b)

    run(main())


def test_joining_through_nobody_fails_with_a_hint(tmp_path: Path) -> None:
    async def main() -> None:
        nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{new_identity().text}"
        with pytest.raises(NobodyThere) as failed:
            async with node(tmp_path, "a", [nobody]):
                pass
        assert failed.value.hint
        # nothing is held: the same identity starts again at once
        async with node(tmp_path, "a"):
            pass

    run(main())


def test_two_nodes_on_one_port_or_one_identity(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a:
            with pytest.raises(PortInUse) as taken:
                async with node(tmp_path, "b", port=a.daemon.port):
                    pass
            assert str(a.daemon.port) in str(taken.value) and "--port" in taken.value.hint
            with pytest.raises(IdentityError):
                async with node(tmp_path, "a"):
                    pass
            assert (await a.addresses())[0] == f"/ip4/127.0.0.1/tcp/{a.daemon.port}"

    run(main())


def test_a_port_taken_by_another_program_between_check_and_start(tmp_path: Path) -> None:
    """p2pd's own words about a used port become the same error."""

    async def main() -> None:
        load_or_create(tmp_path / "a.key").close()
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(PortInUse):
                free_port(("127.0.0.1",), port)
            daemon = Daemon(daemon_settings(tmp_path, "a", port=port), tmp_path / "run")
            (tmp_path / "run").mkdir()
            with pytest.raises(PortInUse):
                await daemon._start(("127.0.0.1",), port)
            await daemon.stop()

    run(main())


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(DaemonError) as failed:
            await Daemon.start(daemon_settings(tmp_path, "missing"))
        assert "no such file" in failed.value.message and "doctor" in failed.value.hint
        with pytest.raises(DaemonError):
            await Daemon.start(daemon_settings(tmp_path, "x", hosts=("192.0.2.1",)))

    run(main())


def test_ipv6_and_all_interfaces(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, "a", hosts=("127.0.0.1", "::1")) as a:
            listens = await a.transport.own_addresses()
            assert set(listens) == {
                f"/ip4/127.0.0.1/tcp/{a.daemon.port}",
                f"/ip6/::1/tcp/{a.daemon.port}",
            }
            six = next(i for i in await a.invitations() if "/ip6/" in i)
            async with node(tmp_path, "b", [six]) as b:
                answer = await b.request(a.peer_id, messages.Ping(), messages.Pong)
                assert answer.address.startswith("/ip6/::1/")

    try:
        free_port(("::1",), 0)
    except DaemonError:
        pytest.skip("this machine has no IPv6")
    run(main())


def test_announced_addresses_replace_found_ones(tmp_path: Path) -> None:
    async def main() -> None:
        _, port = free_port(("127.0.0.1",), 0)
        announce = ("203.0.113.7", "/dns/host.example/tcp/4001")
        async with node(tmp_path, "a", port=port, announce=announce) as a:
            expected = {f"/ip4/203.0.113.7/tcp/{port}", "/dns/host.example/tcp/4001"}
            assert set(await a.addresses()) == expected
            assert {split_peer(i)[1] for i in await a.invitations()} == expected
            assert set(await a.transport.own_addresses()) == expected
        with pytest.raises(DaemonError) as failed:
            async with node(tmp_path, "b", announce=("203.0.113.7",)):
                pass
        assert "--port" in failed.value.hint

    run(main())


def test_a_host_that_cannot_be_dialled_is_reached_over_a_relay(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, "relay", reachability="public") as relay:
            via = await relay.invitations()
            async with (
                node(
                    tmp_path, "hidden", via, hosts=(), relays=tuple(via), reachability="private"
                ) as hidden,
                node(tmp_path, "b", via, hosts=()) as b,  # cannot be dialled back either
            ):

                async def has_address() -> bool:
                    return bool(await hidden.addresses())

                await until_async(has_address, 30.0)
                assert all(is_relayed(address) for address in await hidden.addresses())
                assert await hidden.announce(RECORD) > 0
                found = await b.replicas(1)
                assert [signed.peer_id for signed in found] == [hidden.peer_id]
                answer = await b.request_patiently(
                    hidden.peer_id, messages.Ping(), messages.Pong, 20.0
                )
                assert is_relayed(answer.address)
                # a peer that has both kinds of addresses is dialled directly
                async with node(tmp_path, "c", via) as c:
                    detour = through_relay((await relay.addresses())[0], relay.peer_id)
                    known = [detour, *(await c.addresses())]
                    stream = await b.transport.dial(c.peer_id, known, Deadline.after(10.0))
                    assert not is_relayed(stream.remote_address)
                    await stream.close()

    run(main())


def test_the_daemon_ends_with_a_killed_process(tmp_path: Path) -> None:
    """No orphans: p2pd goes when its last client is gone."""

    async def main() -> None:
        load_or_create(tmp_path / "a.key").close()
        daemon = await Daemon.start(daemon_settings(tmp_path, "a"))
        try:
            # what the kernel does to our sockets when we are killed
            daemon.p2p._client.close()
            await until(lambda: daemon._child is not None and daemon._child.returncode is not None)
        finally:
            await daemon.stop()

    run(main())


def test_stop_may_come_at_any_moment_of_a_start(tmp_path: Path) -> None:
    async def main() -> None:
        for steps in (0, 1, 5, 20, 60):
            task = asyncio.create_task(_start_and_wait(tmp_path))
            for _ in range(steps):
                await asyncio.sleep(0.002)  # any moment will do: that is what is tested
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with node(tmp_path, "a") as a:
            assert a.daemon.pid

    run(main())


async def _start_and_wait(folder: Path) -> None:
    async with node(folder, "a"):
        await asyncio.Future()
