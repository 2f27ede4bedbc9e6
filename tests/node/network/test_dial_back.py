"""The knock at a door, and for whom a node knocks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.network.dial_back import (
    BURST,
    BURST_PER_IP,
    Allowance,
    DialBacks,
    caller_address,
    knock,
    observed_ip,
)
from protocol import frames
from protocol.messages import DialBack, DialBackReply, DialOutcome, ErrorCode
from tests.support.loopback import _no_daemon_left, node, run  # noqa: F401

NO_NAME = "x" * 64  # longer than a part of a name can be: nobody is asked for it


@contextmanager
def listening(backlog: int = 8) -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(backlog)
        yield listener


def test_a_knock_tells_libp2p_from_a_closed_port_and_from_other_programs(
    tmp_path: Path, closed: int
) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a:
            assert await knock("127.0.0.1", a.daemon.port, 20.0) == DialOutcome.REACHED
        assert await knock("127.0.0.1", closed) == DialOutcome.REFUSED
        with listening() as silent:
            port = silent.getsockname()[1]
            assert await knock("127.0.0.1", port, 0.3) == DialOutcome.NOT_LIBP2P
        web = await asyncio.start_server(_answer_like_a_web_server, "127.0.0.1", 0)
        async with web:
            port = web.sockets[0].getsockname()[1]
            assert await knock("127.0.0.1", port) == DialOutcome.NOT_LIBP2P
        assert await knock(NO_NAME, 4001) == DialOutcome.UNREACHABLE

    run(main())


async def _answer_like_a_web_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


def test_a_knock_that_nobody_hears_times_out() -> None:
    async def main() -> None:
        with listening(0) as full:
            port = full.getsockname()[1]
            waiting = [socket.socket() for _ in range(4)]  # fill the queue: the next SYN is dropped
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            try:
                assert await knock("127.0.0.1", port, 0.5) == DialOutcome.TIMED_OUT
            finally:
                for one in waiting:
                    one.close()

    run(main())


# --- for whom a node knocks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "ip"),
    [
        ("/ip4/198.51.100.7/tcp/40000", "198.51.100.7"),
        ("/ip6/2001:db8::7/tcp/40000", "2001:db8::7"),
        ("/ip4/198.51.100.7/udp/4001/quic", "198.51.100.7"),
        ("/dns/host.example/tcp/4001", ""),
        ("/p2p-circuit", ""),
        ("", ""),
        ("/ip4/300.1.1.1/tcp/1", ""),
    ],
)
def test_where_a_connection_comes_from(address: str, ip: str) -> None:
    assert observed_ip(address) == ip
    relay = "/p2p/12D3KooWAbR9TiSsjDgFJKBVAnpJPfqkXo3WbHVTmRDvTyWb3bTg/p2p-circuit"
    assert observed_ip(address + relay) == ""


def ask(service: DialBacks, address: str, port: int, run_id: bytes = b"r" * 32) -> DialBackReply:
    async def main() -> Any:
        caller_address.set(address)
        return (await service.answer(DialBack(run=run_id, port=port), b"peer")).message

    reply: DialBackReply = asyncio.run(main())
    return reply


def test_nobody_is_dialled_but_the_asker(closed: int) -> None:
    with listening() as door:
        port = door.getsockname()[1]
        everywhere = DialBacks(b"r" * 32, ("0.0.0.0", "::"))
        here = DialBacks(b"r" * 32, ("127.0.0.1",))
        relayed = (
            "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWAbR9TiSsjDgFJKBVAnpJPfqkXo3WbHVTmRDvTyWb3bTg"
            "/p2p-circuit"
        )
        door.settimeout(0.0)
        for service, address in (
            (everywhere, "/ip4/127.0.0.1/tcp/1"),  # behind a proxy all strangers look like this
            (everywhere, "/ip6/::ffff:127.0.0.1/tcp/1"),
            (everywhere, "/ip6/fe80::1/tcp/1"),
            (everywhere, "/ip4/169.254.169.254/tcp/1"),
            (here, relayed),
            (here, ""),
        ):
            assert ask(service, address, port).outcome == DialOutcome.NOT_TRIED
        with pytest.raises(BlockingIOError):
            door.accept()  # nobody came
        with pytest.raises(frames.Refused) as wrong:
            ask(here, "/ip4/127.0.0.1/tcp/1", port, b"x" * 32)
        assert wrong.value.code == ErrorCode.WRONG_RUN
    assert ask(here, "/ip4/127.0.0.1/tcp/1", closed).outcome == DialOutcome.REFUSED


def test_an_ip_cannot_ask_often_and_all_together_cannot_either(closed: int) -> None:
    now_s = 0.0
    service = DialBacks(b"r" * 32, ("127.0.0.1",), lambda: now_s)
    port = closed
    for _ in range(BURST_PER_IP):
        ask(service, "/ip4/127.0.0.1/tcp/1", port)
    with pytest.raises(frames.Busy) as busy:
        ask(service, "/ip4/127.0.0.1/tcp/2", port)
    ask(service, "/ip4/127.0.0.2/tcp/1", port)  # another one is not held up
    now_s += busy.value.retry_after_s
    ask(service, "/ip4/127.0.0.1/tcp/1", port)
    allowed = 0
    with suppress(frames.Busy):
        for last in range(3, 40):
            ask(service, f"/ip4/127.0.0.{last}/tcp/1", port)
            allowed += 1
    assert 0 < allowed <= BURST


@given(st.lists(st.floats(0.0, 20.0), max_size=60), st.integers(1, 5))
def test_an_allowance_is_never_exceeded(gaps: list[float], burst: int) -> None:
    now_s, taken = 0.0, []
    allowance = Allowance(burst, 2.0, lambda: now_s)
    for gap in gaps:
        now_s += gap
        if not allowance.wait_s("x"):
            allowance.take("x")
            taken.append(now_s)
    for index, at_s in enumerate(taken):
        before = [t for t in taken[: index + 1] if t > at_s - 10.0]
        assert len(before) <= burst + 5 + 1
