"""A connection that died while the line came back: it is replaced, and only then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from node.network import addresses
from node.network.gate import Unreachable
from node.network.hivemind_parts import p2pd_pb2
from node.network.network import Network
from node.network.stale_line import _greets, greets
from node.network.transport import Transport
from protocol import messages
from protocol.errors import WireError
from protocol.frames import Deadline, Stalled
from protocol.identity import new_identity
from tests.support.loopback import RUN_ID, _no_daemon_left, node, run, until, until_async  # noqa: F401


class Line:
    """A TCP line to a host. What is on it when it is cut stays where it is, also once it heals."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = ""
        self.cut = False
        self._up = asyncio.Event()
        self._up.set()

    def break_(self) -> None:
        self.cut = True
        self._up.clear()  # of all connections so far: theirs is never set again
        self._up = asyncio.Event()

    def heal(self) -> None:
        self.cut = False
        self._up.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            ways = (self._pump(reader, onward), self._pump(onward_reader, writer))
            await asyncio.gather(*ways)
        except OSError:
            pass
        finally:
            onward.transport.abort()
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up = self._up
        while data := await reader.read(1 << 16):
            await up.wait()
            writer.write(data)
            await writer.drain()
        writer.transport.abort()


@contextlib.asynccontextmanager
async def line_to(network: Network) -> AsyncIterator[Line]:
    """A line to a node, with an address of its own."""
    host, port = addresses.host_port((await network.addresses())[0])
    line, carried = Line(port), set[asyncio.Task[None]]()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(line.carry(reader, writer))
        carried.add(task)

    server = await asyncio.start_server(accept, host, 0)
    line.address = f"/ip4/{host}/tcp/{server.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()
        for task in carried:
            task.cancel()
        await asyncio.gather(*carried, return_exceptions=True)


async def ask(network: Network, other: bytes, seconds: float) -> None:
    """As a round asks: on a stream that is kept."""
    hello = messages.Hello(run=RUN_ID)
    await network.request(
        other, hello, messages.HelloReply, deadline_s=seconds, stall_s=seconds, again_soon=True
    )


def test_a_stale_connection_is_replaced_as_soon_as_the_line_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.network.transport.QUIET_S", 0.3)

    async def main() -> None:
        async with node(tmp_path, "a") as a, line_to(a) as line, node(tmp_path, "b") as b:
            b._seeds[a.peer_id] = (line.address,)
            await ask(b, a.peer_id, 10.0)
            line.break_()
            for _ in range(2):  # in vain, and the connection is left alone
                with pytest.raises(Stalled):
                    await ask(b, a.peer_id, 1.0)
            assert not await greets([line.address])
            assert a.peer_id in await b.transport.connected()
            line.heal()
            assert await greets([line.address])

            async def answers() -> bool:
                with contextlib.suppress(WireError):
                    await ask(b, a.peer_id, 2.0)
                    return True
                return False

            await until_async(answers)  # the old connection would never answer again
            assert not b.transport.is_silent(a.peer_id)

    run(main())


def test_who_is_heard_or_answers_keeps_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a, node(tmp_path, "b", await a.invitations()) as b:
            dropped: list[bytes] = []

            async def disconnect(peer_id: bytes) -> None:
                dropped.append(peer_id)

            monkeypatch.setattr(b.transport, "disconnect", disconnect)
            now_s = asyncio.get_running_loop().time()
            b.transport.unanswered(a.peer_id, now_s)  # one question, just now
            await ask(b, a.peer_id, 10.0)
            assert not b.transport.is_silent(a.peer_id) and not dropped
            b.transport.unanswered(a.peer_id, now_s - 60.0)  # but its stream was heard of just now
            await ask(b, a.peer_id, 10.0)
            assert not dropped
            b._pool.clear()
            await until(lambda: all(s.peer_id != a.peer_id for s in b.transport._streams))
            b.transport.unanswered(a.peer_id, now_s - 60.0)
            await ask(b, a.peer_id, 10.0)
            assert dropped == [a.peer_id]

    run(main())


def test_a_connection_that_was_made_while_we_looked_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ask a silent peer at once, and it asks us: one new connection must do for all."""

    async def main() -> None:
        async with node(tmp_path, "a") as a, node(tmp_path, "b", await a.invitations()) as b:
            dropped: list[bytes] = []

            async def disconnect(peer_id: bytes) -> None:
                dropped.append(peer_id)

            async def answered_meanwhile(known: list[str]) -> bool:
                b.transport.answered(a.peer_id)
                return True

            monkeypatch.setattr(b.transport, "disconnect", disconnect)
            monkeypatch.setattr("node.network.transport.greets", answered_meanwhile)
            await ask(b, a.peer_id, 10.0)
            b._pool.clear()
            await until(lambda: all(s.peer_id != a.peer_id for s in b.transport._streams))
            b.transport.unanswered(a.peer_id, asyncio.get_running_loop().time() - 60.0)
            await ask(b, a.peer_id, 10.0)
            assert not dropped

    run(main())


def test_p2pd_is_not_made_to_dial_where_nobody_greets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each dial in vain makes it wait for longer: after a minute 30 s, at last 5 minutes."""
    dialled = 0

    async def main() -> None:
        async with node(tmp_path, "b") as b:
            async with node(tmp_path, "a") as a:
                other, port = a.peer_id, a.daemon.port
                b._seeds[other] = await a.addresses()
            control = b.transport._ask

            async def counted(request: Any, timeout_s: float) -> Any:
                nonlocal dialled
                dialled += request.type == p2pd_pb2.Request.CONNECT
                return await control(request, timeout_s)

            monkeypatch.setattr(b.transport, "_ask", counted)
            for _ in range(5):
                with pytest.raises(Unreachable):
                    await ask(b, other, 2.0)
            assert dialled == 1

            async with node(tmp_path, "a", port=port):

                async def answers() -> bool:
                    with contextlib.suppress(WireError):
                        await ask(b, other, 2.0)
                        return True
                    return False

                await until_async(answers)

    run(main())


def test_nobody_greets_where_nobody_is() -> None:
    async def main() -> None:
        assert not await greets([])
        assert not await greets(["/ip4/127.0.0.1/tcp/9"])  # nobody listens there

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.transport.abort()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert not await greets([f"/ip4/127.0.0.1/tcp/{port}"])
        server.close()

    run(main())


@pytest.mark.parametrize("name", ["a..b", "x" * 70, ".", "a\0b"])
def test_a_name_that_no_resolver_takes_greets_nobody(name: str) -> None:
    """asyncio raises UnicodeError for these, which no caller of `greets` expects."""
    run(_expect_silence(name))


async def _expect_silence(name: str) -> None:
    assert not await _greets(name, 4001)


def test_whatever_an_address_breaks_its_peer_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(known: Any) -> bool:
        raise UnicodeError("label empty or too long")

    async def main() -> None:
        transport = Transport(tmp_path / "control", tmp_path / "incoming")

        async def nobody() -> dict[bytes, list[str]]:
            return {}

        monkeypatch.setattr(transport, "connected", nobody)
        monkeypatch.setattr("node.network.transport.greets", breaks)
        peer_id, known = new_identity().peer_id, ["/ip4/127.0.0.1/tcp/9"]
        transport._unreached[peer_id] = -60.0  # dialled in vain a while ago: it is probed first
        with pytest.raises(Unreachable):
            await transport.connect(peer_id, known, 1.0)
        transport._silent[peer_id] = -60.0
        with pytest.raises(Unreachable):
            await transport.dial(peer_id, known, Deadline.after(1.0))

    run(main())
