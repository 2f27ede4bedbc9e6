"""`blockswarm doctor`: every check on a machine that is well, and every way in which one is not."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import node.network.daemon as node_daemon
from node.doctor import machine as doctor_machine
from node.doctor import network as doctor_network
from node.doctor.examine import Check, Examination, examine, facts, well, within_time
from node.doctor.network import network_checks
from node.machine import own_packages
from node.network.service import Reply
from protocol import messages
from tests.support.command_line import exit_code
from tests.support.loopback import RUN_FILE, _no_daemon_left, run, tell_the_time  # noqa: F401
from tests.support.loopback import node as node_of_a_run
from tests.support.paths import ROOT

LOOPBACK = ("127.0.0.1",)


def by_name(checks: Sequence[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.fixture
def closed() -> Iterator[int]:
    """A port on which nothing listens, and which nobody else can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


# --- as a whole -----------------------------------------------------------------------------------


def test_a_machine_that_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The machine of the tests has all that a host needs."""
    heard: list[Check] = []
    found = run(examine(Examination((), 0, LOOPBACK, tmp_path), heard.append), 120.0)
    assert heard == found and well(found)
    states = {check.name: check.state for check in found}
    assert set(states) == {
        "python",
        "packages",
        "versions",
        "torch",
        "memory",
        "disk",
        "port",
        "p2pd",
        "clock",
        "reachability",
    }
    assert {name for name, state in states.items() if state == "skipped"} <= {
        "clock",
        "reachability",
        "versions",  # run from a tree that is not installed
    }
    told = json.loads(json.dumps(facts(found)))
    assert told["ok"] is True and len(told["checks"]) == len(found)
    assert all(row["seconds"] >= 0 and row["what"] for row in told["checks"])


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed check: numbered fixes and exit code 1; the same as JSON."""

    async def few(plan: Examination, hear: Any) -> list[Check]:
        checks = [
            Check("python", "ok", "3.11"),
            Check("port", "failed", "taken \x1b[31m", ("stop it", "--port 4002")),
        ]
        for check in checks:
            hear(check)
        return checks

    monkeypatch.setattr("node.commands.doctor.examine", few)
    assert exit_code(monkeypatch, "doctor") == 1
    out = capsys.readouterr().out
    assert "FAIL  port" in out and "1. stop it" in out and "2. --port 4002" in out
    assert "not well: port" in out and "\x1b" not in out
    assert exit_code(monkeypatch, "doctor", "--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert exit_code(monkeypatch, "doctor", "nonsense") == 2
    assert "does not say whom to dial" in capsys.readouterr().err
    assert exit_code(monkeypatch, "doctor", "--listen", "here") == 2
    assert exit_code(monkeypatch, "doctor", "--port", "70000") == 2


def test_a_check_that_hangs_or_breaks_is_a_finding() -> None:
    async def hang() -> Check:
        await asyncio.Event().wait()
        raise AssertionError

    async def crash() -> Check:
        raise RuntimeError("from some library")

    async def all_of_them() -> list[Check]:
        return [*await within_time("slow", hang, 0.05), *await within_time("broken", crash)]

    slow, broken = asyncio.run(all_of_them())
    assert slow.state == broken.state == "failed"
    assert "longer than" in slow.what and "from some library" in broken.what and broken.fixes


# --- the machine ----------------------------------------------------------------------------------


def test_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "PYTHON", (3, 42))
    check = doctor_machine.python()
    assert check.state == "failed" and "python3.42 -m venv" in check.fixes[0]


def test_packages_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_packages, "owners_of", lambda name: ("other-dist",))
    check = doctor_machine._ours()
    assert check.state == "warning" and "pip uninstall other-dist" in check.fixes
    monkeypatch.setitem(own_packages.MARKS, "swarm", "no-such-file")
    check = doctor_machine._ours()
    assert check.state == "failed" and "`swarm`" in check.what
    assert check.fixes[0] == "pip uninstall other-dist"


@pytest.mark.parametrize("name", ["protocol", "swarm"])
def test_a_package_that_shadows_ours_is_told_by_every_command(tmp_path: Path, name: str) -> None:
    """Through the real command: without the check it is a traceback, even of doctor.

    With -S, as an editable installation would find our modules in spite of the other package.
    """
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    places = (tmp_path, ROOT, sysconfig.get_path("purelib"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    done = subprocess.run(
        [sys.executable, "-S", "-c", "from node.cli import main; main()", "doctor"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"`{name}`" in done.stderr and str(tmp_path) in done.stderr and "try: " in done.stderr


def test_versions_that_are_known_not_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy<2.4,>=1.26", 'hivemind<1.2,>=1.1.11; extra == "host"', "zstandard<1"]
    there = {"numpy": "2.4.1"}

    def version(name: str) -> str:
        if name not in there:
            raise doctor_machine.importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(doctor_machine.importlib.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(doctor_machine.importlib.metadata, "version", version)
    check = doctor_machine._versions()
    assert check.state == "failed" and "2.4.1" in check.what and "missing" in check.what
    assert check.fixes[0].startswith('pip install "numpy') and len(check.fixes) == 2


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise ImportError('libgomp.so.1')", "libgomp"), ("import os; os.kill(os.getpid(), 4)", "4")],
)
def test_a_torch_that_does_not_work(code: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "_TORCH", code)
    check = run(doctor_machine.torch())
    assert check.state == "failed" and said in check.what and "pip install" in check.fixes[0]


def test_a_torch_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "_TORCH", "import time; time.sleep(600)")

    async def main() -> list[Check]:
        return await within_time("torch", doctor_machine.torch, 0.5)

    assert run(main())[0].state == "failed"  # and `run` sees that no process's pipe is left


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "memory_bytes", lambda: (2 << 30, 100 << 20))
    check = doctor_machine.memory()
    assert check.state == "failed" and "104.9 MB free of 2.1 GB" in check.what
    assert "--preset tiny" in check.fixes[1]
    monkeypatch.setattr(doctor_machine, "memory_bytes", lambda: (4 << 30, 4 << 30))
    check = doctor_machine.memory()
    assert check.state == "ok" and "fits: tiny, small" in check.what


def test_the_memory_of_this_machine() -> None:
    total, free = doctor_machine.memory_bytes()
    assert 0 < free <= total


def test_a_disk_that_is_full_or_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tmp_path / "not" / "there" / "yet"
    assert doctor_machine.disk(wanted).state == "ok" and not wanted.parent.exists()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(doctor_machine, "SPARE_DISK_BYTES", 1 << 60)
    full = doctor_machine.disk(tmp_path)
    assert full.state == "failed" and "--folder" in full.fixes[0]
    if Path("/proc/version").exists():  # nobody can write there, not even root
        closed = doctor_machine.disk(Path("/proc/blockswarm"))
        assert closed.state == "failed" and "cannot write" in closed.what


# --- the way out and in ---------------------------------------------------------------------------


def test_ports(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            number = taken.getsockname()[1]
            check = await doctor_network.port(Examination(port=number, listen=LOOPBACK))
            assert check.state == "failed" and str(number) in check.what
            assert f"sport = :{number}" in check.fixes[0] and "--port" in check.fixes[0]
        async with node_of_a_run(tmp_path, "a") as a:
            check = await doctor_network.port(Examination(port=a.daemon.port, listen=LOOPBACK))
            assert check.state == "warning" and "your own host" in check.what
        assert (await doctor_network.port(Examination(listen=LOOPBACK))).state == "ok"
        check = await doctor_network.port(Examination(listen=("192.0.2.1",)))
        assert check.state == "failed" and "--listen" in check.fixes[0]

    run(main())


def test_p2pd_that_is_not_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "p2pd"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    monkeypatch.setattr(node_daemon, "_binary", lambda: str(program))
    checks = by_name(run(network_checks(Examination(listen=LOOPBACK))))
    assert checks["p2pd"].state == "failed" and checks["p2pd"].fixes == (f"chmod +x {program}",)
    assert checks["clock"].state == "skipped"
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    checks = by_name(run(network_checks(Examination(listen=LOOPBACK))))
    assert "killed by SIGKILL" in checks["p2pd"].what


def test_peers_clock_and_reachability(tmp_path: Path) -> None:
    async def main() -> None:
        async with node_of_a_run(tmp_path, "a") as a:
            [address] = await a.invitations()
            checks = by_name(await network_checks(Examination((address,), 0, LOOPBACK)))
            assert {name: check.state for name, check in checks.items()} == {
                "p2pd": "ok",
                "peers": "ok",
                "clock": "ok",
                "reachability": "ok",
            }
            assert "opened a new connection" in checks["reachability"].what
            # a host that has the port already is the one that is knocked at
            async with node_of_a_run(tmp_path, "b", join=[address]) as b:
                plan = Examination((address,), b.daemon.port, LOOPBACK)
                checks = by_name(await network_checks(plan))
                assert f"127.0.0.1:{b.daemon.port}" in checks["reachability"].what
            tell_the_time(a, 3600.0)
            checks = by_name(await network_checks(Examination((address,), 0, LOOPBACK)))
            assert checks["clock"].state == "failed" and "60 minutes behind" in checks["clock"].what
            assert "timedatectl" in checks["clock"].fixes[0]

    run(main(), 120.0)


def test_a_peer_that_cannot_reach_us(tmp_path: Path) -> None:
    async def main() -> None:
        async with node_of_a_run(tmp_path, "a") as a:
            [address] = await a.invitations()

            async def no(request: messages.DialBack, peer_id: bytes) -> Reply:
                return Reply(messages.DialBackReply(outcome=3, observed="198.51.100.7"))

            a.serve(messages.DialBack, no)
            checks = by_name(await network_checks(Examination((address,), 0, LOOPBACK)))
            failed = checks["reachability"]
            assert failed.state == "failed" and "198.51.100.7" in failed.what
            assert f"doctor {address} --port" in failed.fixes[0] and "--relay" in failed.fixes[-1]

    run(main())


def test_peers_that_do_not_answer(tmp_path: Path, closed: int) -> None:
    async def main() -> None:
        async with node_of_a_run(tmp_path, "a") as a:
            [address] = await a.invitations()
            peer = address.rpartition("/")[2]
            wrong = f"/ip4/127.0.0.1/tcp/{closed}/p2p/{peer}"
            found = await network_checks(Examination((wrong,), 0, LOOPBACK))
            checks = by_name(found)
            assert checks["peers"].state == "failed" and "refused" in checks["peers"].what
            assert checks["clock"].state == checks["reachability"].state == "skipped"
            assert not well(found)

    run(main())


def test_a_run_file_that_is_not_usable_is_told() -> None:
    assert "not usable" in doctor_network._run_name(RUN_FILE)
