"""`blockswarm peers --light`: the command in a process of its own, what it checks and shows."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from node.commands.light import (
    Survey,
    check_claims,
    light_commands,
    print_survey,
    role_names,
    run_name,
    survey_facts,
)
from protocol.frames import content_digest
from protocol.identity import Identity
from protocol.messages import HelloReply
from protocol.records import Record, Role, SignedRecord, seal
from tests.support.light_processes import SOMEBODY, Server, needs_libp2p
from tests.support.paths import ROOT

NOW_S = 1_700_000_000.0
RUN = content_digest(b"run")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server"))
    yield started
    started.close()


# --- the command --------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`blockswarm peers ...` where hivemind and torch do not exist."""
    line = [sys.executable, "-W", "error", "-m", "tests.support.light_client", "peers", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@needs_libp2p
def test_the_table(server: Server) -> None:
    server.behave("mixed")
    done = command("--light", server.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert "name   light test" in done.stdout
    row = next(
        line for line in done.stdout.splitlines() if line.startswith(".." + server.peer[-8:])
    )
    assert "seed+server" in row
    assert "refused records: " in done.stdout and "2 forged" in done.stdout


@needs_libp2p
def test_json(server: Server) -> None:
    server.behave("honest")
    done = command("--light", server.address, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["peers"]) == 4


@needs_libp2p
def test_an_error_is_two_lines_and_code_2(server: Server) -> None:
    server.behave("garbage")
    done = command("--light", server.address, "--timeout", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: this is not a blockswarm frame\n")
    assert len(done.stderr.splitlines()) == 2


@needs_libp2p
def test_ctrl_c_is_no_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{SOMEBODY}"
        line = [sys.executable, "-m", "tests.support.light_client", "peers", "--light", address]
        with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True) as asking:
            listener.settimeout(30)
            connection, _ = listener.accept()
            connection.recv(1)  # it has begun to talk, and we say nothing
            asking.send_signal(signal.SIGINT)
            _, said = asking.communicate(timeout=20)
        connection.close()
    assert (asking.returncode, said.strip()) == (130, "stopped")


def test_without_py_libp2p_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['libp2p'] = None\n"
        "from node import cli; from node.commands import light\n"
        "cli.cli.add_command(light.peers)\n"
        f"sys.argv = ['blockswarm', 'peers', '--light', '/ip4/127.0.0.1/tcp/1/p2p/{SOMEBODY}']\n"
        "cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert 'pip install "blockswarm[light]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_imports_no_network_library() -> None:
    code = (
        "import sys, node.cli, node.commands.light\n"
        "heavy = {'torch', 'hivemind', 'libp2p', 'trio', 'multiaddr'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_an_address_is_required() -> None:
    result = CliRunner().invoke(light_commands[0], [])
    assert result.exit_code == 2
    assert "--light" in result.output


@pytest.mark.long
def test_in_a_venv_that_has_no_hivemind(server: Server, tmp_path: Path) -> None:
    """As a user would install it. Needs a package index."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv/bin/python")
    wanted = ["-c", "constraints.txt", "-e", ".[light]"]
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if "from versions: none" in installed.stderr:
        pytest.skip("no package index can be reached from here")
    assert installed.returncode == 0, installed.stderr
    absent = subprocess.run([python, "-c", "import hivemind"], capture_output=True, check=False)
    assert absent.returncode != 0
    server.behave("honest")
    line = [str(tmp_path / "venv/bin/blockswarm"), "peers", "--light", server.address, "--json"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["peers"]) == 4


# --- checking and showing, with no network ------------------------------------------------------


def record(seed: int, **changes: Any) -> SignedRecord:
    values: dict[str, Any] = {"run": RUN, "role": 1, "block": 0, "round": 1, "sequence": 1}
    return seal(Identity(bytes([seed]) * 32), Record(**{**values, **changes}), NOW_S + 60)


@given(st.data())
def test_a_changed_claim_is_never_verified(data: st.DataObject) -> None:
    signed = record(1)
    claim: list[Any] = [signed.key, signed.subkey, signed.value, signed.expiration_s]
    assert len(check_claims([tuple(claim)], RUN, NOW_S)[0]) == 1
    part = data.draw(st.integers(0, 3))
    if part == 3:
        claim[3] = signed.expiration_s + data.draw(st.floats(0.001, 500))
    else:
        changed = bytearray(claim[part])
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place] ^= data.draw(st.integers(1, 255))
        claim[part] = bytes(changed)
    verified, refused = check_claims([tuple(claim)], RUN, NOW_S)
    assert verified == [] and sum(refused.values()) == 1


@given(
    st.binary(max_size=200) | st.text().map(lambda t: f'name = "{t}"'.encode("utf-8", "replace"))
)
def test_the_name_of_any_run_file_can_be_printed(run_file: bytes) -> None:
    assert run_name(run_file).isprintable()


@pytest.mark.parametrize(
    ("run_file", "name"),
    [
        (b'name = "a run"', "a run"),
        (b'name = "\\u001b[2J"', ""),  # would clear the screen
        (b"name = 3", ""),
        (b"seed = 1", ""),
        (b"\xff\xfe", ""),
        (b"a = " + b"[" * 60000, ""),
        (b'name = "' + b"x" * 300 + b'"', ""),
    ],
)
def test_run_names(run_file: bytes, name: str) -> None:
    assert run_name(run_file) == name


def test_roles_of_newer_versions_are_shown_as_bits() -> None:
    assert role_names(Role.REPLICA | Role.SERVER) == ["replica", "server"]
    assert role_names(Role.SEED | 0x40) == ["seed", "0x40"]
    assert role_names(0) == []


def test_a_wrong_clock_is_said_beside_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    hello = HelloReply(run=RUN, role=0, round=0, now_s=NOW_S + 3600)
    print_survey(survey_facts(Survey(RUN, b"", hello, (), {"expired": 2}, 0, 3600.0), NOW_S))
    captured = capsys.readouterr()
    assert "refused records: 2 expired" in captured.out
    assert "3600 s apart" in captured.err
