"""Errors that people really meet, through the real command line and real p2pd's.

Each says what happened, the likely cause and the next thing to type, in two lines and exit code 2,
with no traceback.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

import node.network.daemon as node_daemon
from node.network import invitation
from node.network.addresses import with_peer
from node.network.client import guest
from node.network.daemon import Daemon
from node.network.network import Network, NetworkSettings
from node.network.p2pd_stream import P2pdStream
from node.network.service import Status
from node.network.transport import Caller
from protocol.frames import encode_head
from protocol.identity import Identity, load_or_create
from protocol.limits import Kind
from protocol.records import Role
from protocol.version import PACKAGE_VERSION, PROTOCOL_MAJOR
from swarm.run_template import emit
from swarm.runfile import RunFile, run_id, with_start
from tests.support.command_line import Cli, Result, run_command
from tests.support.live import Process, tiny_run_file
from tests.support.loopback import _no_daemon_left, daemon_settings, run, tell_the_time  # noqa: F401
from tests.support.paths import ROOT

STRANGER = Identity(b"s" * 32).peer_id
RUN_FILE = with_start(emit(tiny_run_file()), int(time.time()) - 5)


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """The command line as a new user runs it, in an empty folder; with shorter waits."""
    handlers = list(logging.getLogger().handlers)
    monkeypatch.setattr(invitation, "ASK_S", 20.0)
    monkeypatch.setattr(invitation, "KNOCK_S", 4.0)
    monkeypatch.setattr(invitation, "OTHERS_S", 20.0)  # a busy machine
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    yield functools.partial(run_command, monkeypatch, capsys)
    logging.getLogger().handlers = handlers


def beside(work: Coroutine[Any, Any, None]) -> None:
    """Run peers on this thread's loop; the command line gets a thread, and so a loop, of its own.

    Not `loopback.run`: uvloop keeps a socket for a loop that ran in another thread.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(work, 120.0))


@asynccontextmanager
async def peer(folder: Path, name: str = "a", text: bytes = RUN_FILE) -> AsyncIterator[Network]:
    """A peer of a run, as others see it."""
    settings = NetworkSettings(daemon_settings(folder, name), run_id(text), text)
    network = Network(settings, lambda: Status(Role.REPLICA, 1, (0,)))
    async with network:
        yield network


async def address_of(network: Network) -> str:
    return (await network.invitations())[0]


@pytest.fixture
def closed() -> Iterator[int]:
    """A port on which nothing listens, and which nobody else can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that answers nothing at all: its queue of callers is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        callers = [socket.socket() for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
        for caller in callers:
            caller.close()


def at(port: int, peer_id: bytes = STRANGER) -> str:
    return with_peer(f"/ip4/127.0.0.1/tcp/{port}", peer_id)


# --- nobody answers -------------------------------------------------------------------------------


def test_seeds_that_refuse_and_time_out_are_told_apart(
    cli: Cli, closed: int, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invitation, "ASK_S", 2.0)
    other = Identity(b"o" * 32).peer_id
    refused, slow = at(closed), at(silent, other)
    result = cli("join", refused, slow)
    result.refuses(
        f"{refused}: connection refused: 127.0.0.1 is up, but nothing listens on port {closed}",
        f"{slow}: timed out: nothing came back from 127.0.0.1 port {silent}",
        f"blockswarm doctor {refused} {slow}",
    )


def test_one_seed_that_lives_is_enough(tmp_path: Path, closed: int) -> None:
    """And the dead one costs a second at most, not its whole time."""

    async def serve() -> None:
        async with peer(tmp_path) as a:
            addresses = [at(closed), await address_of(a)]
            async with guest() as visitor:
                assert await visitor.fetch_run(addresses) == RUN_FILE

    run(serve())


def test_another_program_answers(cli: Cli) -> None:
    async def serve() -> None:
        async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(web, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            result = await asyncio.to_thread(cli, "join", at(port))
        result.refuses(f"another program than blockswarm answers on 127.0.0.1 port {port}")

    beside(serve())


def test_a_wrong_peer_id_in_the_address(cli: Cli, tmp_path: Path) -> None:
    async def serve() -> None:
        async with peer(tmp_path) as a:
            right = await address_of(a)
            wrong = at(a.daemon.port)
            result = await asyncio.to_thread(cli, "join", wrong)
        result.refuses("another peer answers there", f"blockswarm join {right}")
        assert right.rpartition("/")[2] in result.err.splitlines()[-2]

    beside(serve())


# --- the wrong run, the wrong time, the wrong version ---------------------------------------------


def test_addresses_of_two_runs_and_the_folder_of_another(cli: Cli, tmp_path: Path) -> None:
    other = with_start(emit(tiny_run_file(seed=7)), int(time.time()))

    async def serve() -> None:
        async with peer(tmp_path) as a, peer(tmp_path, "b", other) as b:
            addresses = await address_of(a), await address_of(b)
            result = await asyncio.to_thread(cli, "join", *addresses)
            result.refuses("these addresses belong to different runs")
            folder = tmp_path / "host"
            folder.mkdir()
            (folder / "run.toml").write_bytes(other)
            result = await asyncio.to_thread(cli, "join", addresses[0], "--folder", folder)
            result.refuses(
                "is the folder of another run",
                run_id(RUN_FILE).hex()[:16],
                run_id(other).hex()[:16],
                "--folder",
            )
            assert (folder / "run.toml").read_bytes() == other

    beside(serve())


@pytest.mark.parametrize(("offset_s", "words"), [(9000.0, "2.5 hours behind"), (-300.0, "ahead")])
def test_a_clock_that_is_off(cli: Cli, tmp_path: Path, offset_s: float, words: str) -> None:
    async def serve() -> None:
        async with peer(tmp_path) as a:
            tell_the_time(a, offset_s)
            result = await asyncio.to_thread(cli, "join", await address_of(a))
        result.refuses("the clock of this machine is", words, "NTP", "timedatectl set-ntp true")

    beside(serve())


def test_a_clock_that_is_a_little_off_is_only_mentioned() -> None:
    said: list[str] = []
    invitation.check_clock([0.2, 30.0, 31.0], said.append)
    assert "30 s behind" in said[0] and len(said) == 1
    invitation.check_clock([3.0, -3.0, 1e9], said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("major", "words"),
    [
        (PROTOCOL_MAJOR + 1, 'pip install --upgrade "blockswarm[host]"'),
        (PROTOCOL_MAJOR - 1, "ask its operator to upgrade"),
    ],
)
def test_another_major_version(cli: Cli, tmp_path: Path, major: int, words: str) -> None:
    """A peer of another version answers as the protocol says: an error frame of its own."""

    async def answer(stream: P2pdStream, caller: Caller) -> None:
        await stream.read(4096, 10.0)
        frame = bytearray(encode_head(Kind.ERROR, b"\x81\xa4code\x02", 0))
        frame[4] = major
        await stream.write(bytes(frame), 10.0)
        while await stream.read(4096, 10.0):
            pass

    async def serve() -> None:
        load_or_create(tmp_path / "a.key").close()
        daemon = await Daemon.start(daemon_settings(tmp_path, "a"))
        try:
            await daemon.transport.serve(answer)
            result = await asyncio.to_thread(cli, "join", at(daemon.port, daemon.peer_id))
        finally:
            await daemon.stop()
        result.refuses(
            "another version of the protocol", f"protocol {major}.", words, PACKAGE_VERSION
        )

    beside(serve())


# --- this machine ---------------------------------------------------------------------------------


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = seed(tmp_path, tiny_run_file(), "--port", port)
    result.refuses(f"another process listens on port {port}", f"sport = :{port}", "--port")


def test_no_block_fits_into_memory(tmp_path: Path) -> None:
    result = seed(tmp_path, tiny_run_file(), "--max-memory", "0.05")
    result.refuses("no block fits", "--max-memory")


def test_a_text_that_is_not_the_runs(tmp_path: Path) -> None:
    """The run names a checksum, and this host's text has another."""
    base = tiny_run_file()
    data = dataclasses.replace(base.data, sha256="0" * 64)
    result = seed(tmp_path, dataclasses.replace(base, data=data), "--threads", 1)
    result.refuses("is not the text of this run", "sha256", "--data")


def seed(folder: Path, run_file: RunFile, *options: object) -> Result:
    """`blockswarm seed` in an empty folder. If it starts after all it does not end by itself."""
    (folder / "run.toml").write_bytes(emit(run_file))
    return process(folder, "seed", "run.toml", "--listen", "127.0.0.1", *options)


def process(folder: Path, *arguments: object, before: str = "") -> Result:
    """The command in a process of its own, in which `before` is run first."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(folder / "state"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{before}\nfrom node.cli import main\nmain()",
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=150,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("script", "executable", "words"),
    [
        ("#!/bin/sh\nexit 0\n", False, ["not executable", "chmod +x"]),
        ("#!/bin/sh\nkill -9 $$\n", True, ["killed by SIGKILL", "out of memory", "doctor"]),
        ("#!/bin/sh\necho no such option; exit 3\n", True, ["exit code 3", "no such option"]),
        ("no program at all\n", True, ["not a program for this kind", "pip install"]),
        (None, True, ["p2pd is missing", "pip install"]),
    ],
)
def test_p2pd_that_cannot_start(
    cli: Cli,
    script: str | None,
    executable: bool,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "p2pd"
    if script is not None:
        program.write_text(script)
        program.chmod(0o700 if executable else 0o600)
    monkeypatch.setattr(node_daemon, "_binary", lambda: str(program))
    cli("join", at(9)).refuses(*words)


def test_hivemind_is_not_installed(tmp_path: Path) -> None:
    gone = "import sys; sys.modules['hivemind'] = None"
    result = process(tmp_path, "join", at(9), before=gone)
    result.refuses("needs hivemind", 'pip install "blockswarm[host]"')


# --- behind a router ------------------------------------------------------------------------------


def test_a_host_that_nobody_can_dial_is_told_what_to_do(tmp_path: Path, closed: int) -> None:
    """A real seed, of a run that is under way, that announces a port which leads nowhere."""
    port = node_daemon.free_port(("127.0.0.1",), 0)[1]

    def look_for(words: str, lines: list[str]) -> Callable[[], str | None]:
        return lambda: next((line for line in list(lines) if re.search(words, line)), None)

    async def serve() -> None:
        async with peer(tmp_path) as a:
            options = ["--listen", "127.0.0.1", "--port", port, "--folder", tmp_path / "seed"]
            announced = ["--announce", f"127.0.0.1:{closed}", "--no-train"]
            host = Process("seed", await address_of(a), *options, *announced)
            try:
                wait = functools.partial(asyncio.to_thread, host.until)
                verdict = await wait(look_for("reachable: no", host.err), 200.0)
                assert f"could not connect to 127.0.0.1:{closed}: refused" in verdict
                assert await wait(look_for(rf"  1\. .*listens on {port}", host.err))
                assert await wait(look_for(r"  \d\. .*--relay ADDRESS", host.err))
            finally:
                await asyncio.to_thread(host.leave)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(serve(), 300.0))
