"""`blockswarm peers --light`: py-libp2p against a real p2pd, in processes of their own.

Neither hivemind nor py-libp2p is imported here: the two cannot share a process, and other tests
need this one for hivemind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from node.cli_light import (
    Survey,
    check_claims,
    light_commands,
    print_survey,
    role_names,
    run_name,
    survey_facts,
)
from protocol.frames import content_digest
from protocol.identity import Identity, peer_text
from protocol.messages import HelloReply
from protocol.records import Record, Role, SignedRecord, seal

ROOT = Path(__file__).resolve().parent.parent
NOW_S = 1_700_000_000.0
RUN = content_digest(b"run")
SOMEBODY = peer_text(Identity(b"s" * 32).peer_id)


class JsonProcess:
    """A child that speaks one JSON line per line it is told."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(10)}"
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process.stdout.close()


class Server(JsonProcess):
    """A p2pd with our stream handler; until it is told a behaviour, without the handler."""

    def __init__(self, folder: Path) -> None:
        super().__init__("-m", "tests.light_server", str(folder))
        told = self.hear()
        self.address, self.peer = told["address"], told["peer"]

    def behave(self, behaviour: str) -> None:
        assert self.tell(behaviour) == {"behaviour": behaviour}


Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def bare_answer(tmp_path_factory: pytest.TempPathFactory, ask: Ask) -> Iterator[tuple[Server, Any]]:
    """The server, and what the client got from it before it had our handler."""
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        yield server, ask(server.address)
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(bare_answer: tuple[Server, Any]) -> Server:
    return bare_answer[0]


@pytest.fixture(scope="module")
def client() -> Iterator[JsonProcess]:
    child = JsonProcess("-W", "error", "-m", "tests.light_client")
    yield child
    child.close()


@pytest.fixture(scope="module")
def ask(client: JsonProcess) -> Ask:
    """The light client's answer about an address, from a process that lacks hivemind."""

    def tell(address: str, timeout_s: float = 10.0) -> Any:
        answer = client.tell(json.dumps({"address": address, "timeout_s": timeout_s}))
        assert answer["hivemind"] is False
        assert answer["took_s"] < timeout_s + 3.0
        return answer

    return tell


# --- a live node --------------------------------------------------------------------------------


def test_a_live_node_is_surveyed(server: Server, ask: Ask) -> None:
    server.behave("honest")
    facts = ask(server.address)["facts"]
    assert facts["name"] == "light test"
    assert facts["run"] == content_digest(b'name = "light test"\nseed = 7\n').hex()
    assert [peer["block"] for peer in facts["peers"]] == [0, 1, 2, None]
    assert facts["peers"][-1]["peer"] == server.peer
    assert facts["peers"][-1]["roles"] == ["seed", "server"]
    assert facts["peers"][1]["consensus"] == content_digest(b"1").hex()
    assert facts["peers"][1]["addresses"] == ["/ip4/10.1.0.1/tcp/31337"]
    assert all(0 < peer["expires_in_s"] <= 300 for peer in facts["peers"])
    assert facts["refused"] == {} and facts["superseded"] == 0


def test_what_is_not_signed_live_and_of_this_run_is_refused(server: Server, ask: Ask) -> None:
    server.behave("mixed")
    facts = ask(server.address)["facts"]
    assert len(facts["peers"]) == 4
    assert facts["peers"][-1]["roles"] == ["seed", "server"]  # and not the older record's
    assert facts["superseded"] == 1
    assert facts["refused"] == {
        "expired": 1,
        "lives too long": 1,
        "another run": 1,
        "forged": 2,
        "wrong key": 1,
    }


def test_a_node_without_peers(server: Server, ask: Ask) -> None:
    server.behave("no_peers")
    assert ask(server.address)["facts"]["peers"] == []


def test_a_wrong_clock_is_reported(server: Server, ask: Ask) -> None:
    server.behave("wrong_clock")
    assert 3500 < ask(server.address)["facts"]["clock_offset_s"] < 3700


@pytest.mark.parametrize(
    ("behaviour", "error", "says"),
    [
        ("garbage", "Malformed", "not a blockswarm frame"),
        ("oversize", "Oversize", "the limit is 65536"),
        ("truncated", "Truncated", "before the end of the payload"),
        ("wrong_digest", "DigestMismatch", "changed on its way"),
        ("other_run_file", "DigestMismatch", "another content"),
        ("other_version", "VersionMismatch", "protocol 2.0"),
        ("busy", "Busy", "come back in 7 s"),
        ("not_expected", "Malformed", "expected HelloReply"),
        ("miscounted", "Malformed", "3 records were announced and 4 sent"),
    ],
)
def test_a_hostile_node(server: Server, ask: Ask, behaviour: str, error: str, says: str) -> None:
    server.behave(behaviour)
    answer = ask(server.address)
    assert error in answer["error"]
    assert "WireError" in answer["error"]
    assert says in answer["message"]
    assert answer["grew_mb"] < 64


@pytest.mark.parametrize("behaviour", ["silence", "stalled"])
def test_a_node_that_stalls_costs_one_deadline(server: Server, ask: Ask, behaviour: str) -> None:
    server.behave(behaviour)
    answer = ask(server.address, timeout_s=1.0)
    assert "Stalled" in answer["error"]
    assert answer["took_s"] < 2.5


def test_several_streams_on_one_connection(server: Server, client: JsonProcess) -> None:
    server.behave("honest")
    assert client.tell(json.dumps({"several": server.address}))["peers"] == [4, 4, 4, 4]


def test_after_all_of_that_the_client_still_works(server: Server, ask: Ask) -> None:
    server.behave("honest")
    assert len(ask(server.address)["facts"]["peers"]) == 4


# --- nobody, or somebody else -------------------------------------------------------------------


def test_a_libp2p_node_of_something_else(bare_answer: tuple[Server, Any]) -> None:
    answer = bare_answer[1]
    assert answer["error"][0] == "NotBlockswarm"
    assert "runs no blockswarm" in answer["message"]


def test_another_peer_than_the_address_names(server: Server, ask: Ask) -> None:
    answer = ask(server.address.replace(server.peer, SOMEBODY))
    assert answer["error"][0] == "WrongPeer"
    assert SOMEBODY in answer["message"]


@contextmanager
def tcp_server(answer: bytes | None) -> Iterator[str]:
    """Answers every connection with these bytes, or (None) never accepts one."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as listener:
        listener.settimeout(0.1)
        over = threading.Event()

        def serve() -> None:
            held = []
            while not over.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                held.append(connection)
                connection.sendall(answer or b"")
            for connection in held:
                connection.close()

        thread = threading.Thread(target=serve)
        if answer is not None:
            thread.start()
        yield f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{SOMEBODY}"
        over.set()
        if answer is not None:
            thread.join()


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x80\x80\x80\x80\x01" + bytes(4096),  # a name of 268 MB
        b"\xff" * 64,
        b"\x03\xff\xfe\n",  # not text
        b"\x13/multistream/1.0.0\n\x03na\n",
        b"\x13/multistream/1.0.0\n\x07/noise\n\x00\x60" + os.urandom(96),  # bad Noise
    ],
)
def test_something_that_is_no_libp2p(ask: Ask, garbage: bytes) -> None:
    with tcp_server(garbage) as address:
        answer = ask(address)
    assert answer["error"][0] == "NotLibp2p"
    assert answer["grew_mb"] < 16


def test_silence_after_the_connection(ask: Ask) -> None:
    with tcp_server(None) as address:
        answer = ask(address, timeout_s=0.5)
    assert answer["error"][0] == "Unreachable"
    assert "took the connection, but did not answer" in answer["message"]


def test_no_answer_at_all(ask: Ask) -> None:
    """A full backlog makes Linux drop further connection attempts, like a firewall would."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for attempt in waiting:
            attempt.setblocking(False)
            attempt.connect_ex(("127.0.0.1", port))
        answer = ask(f"/ip4/127.0.0.1/tcp/{port}/p2p/{SOMEBODY}", timeout_s=0.5)
        for attempt in waiting:
            attempt.close()
    assert answer["error"][0] == "Unreachable"
    assert "no answer from" in answer["message"]


@pytest.mark.parametrize("host", ["/ip4/127.0.0.1", "/ip6/::1"])
def test_connection_refused(ask: Ask, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    answer = ask(f"{host}/tcp/{port}/p2p/{SOMEBODY}")
    assert answer["error"][0] == "Unreachable"
    assert "connection refused" in answer["message"] or host == "/ip6/::1"  # may have no IPv6
    assert answer["hint"]


def test_a_name_is_resolved(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    answer = ask(f"/dns4/localhost/tcp/{port}/p2p/{SOMEBODY}")
    assert answer["error"][0] == "Unreachable"
    assert "connection refused" in answer["message"]


def test_a_name_that_cannot_be_one(ask: Ask) -> None:
    answer = ask(f"/dns4/{'a' * 64}.example/tcp/31337/p2p/{SOMEBODY}")  # fails before any lookup
    assert answer["error"][0] == "Unreachable"
    assert "not a host name" in answer["message"]


@pytest.mark.parametrize("how", ["bytes", "streams"])
def test_a_peer_that_ignores_its_windows_is_dropped(client: JsonProcess, how: str) -> None:
    answer = client.tell(json.dumps({"flood": how}))
    assert answer["error"][0] == "Flooded"
    assert answer["grew_mb"] < 100  # sender and receiver are one process there; it offers 1200


# --- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "does not say whom to dial"),
        ("127.0.0.1:31337", "does not say whom to dial"),
        ("/ip4/127.0.0.1/tcp/31337", "does not say whom to dial"),
        (f"/ip4/127.0.0.1/tcp/99999/p2p/{SOMEBODY}", "not an address"),
        (f"/ip4/127.0.0.256/tcp/31337/p2p/{SOMEBODY}", "not an ip4 host"),
        (f"/ip4/127.0.0.1\n/tcp/1/p2p/{SOMEBODY}", "not an address"),
        (f"/ip4/127.0.0.1/udp/31337/quic-v1/p2p/{SOMEBODY}", "plain TCP only"),
        (f"/ip4/127.0.0.1/tcp/31337/ws/p2p/{SOMEBODY}", "plain TCP only"),
        ("/ip4/127.0.0.1/tcp/31337/p2p/", "not a peer id"),
        ("/ip4/127.0.0.1/tcp/31337/p2p/12D3KooW0", "not a peer id"),
        ("/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "peer id"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{SOMEBODY}/p2p-circuit/p2p/{SOMEBODY}", "through a relay"),
    ],
)
def test_bad_addresses(ask: Ask, address: str, says: str) -> None:
    answer = ask(address)
    assert answer["error"][:2] == ["AddressError", "UsageError"]
    assert says in answer["message"]


def test_mutated_addresses_are_refused_or_not_dialled_far(client: JsonProcess) -> None:
    rng, good = random.Random(3), f"/ip4/127.0.0.1/tcp/1/p2p/{SOMEBODY}"
    for _ in range(100):
        place = rng.randrange(len(good) - len(SOMEBODY), len(good))  # host and port stay ours
        text = good[:place] + chr(rng.choice([0, 10, 48, 73, 128, 0x1F600])) + good[place + 1 :]
        answer = client.tell(json.dumps({"address": text, "timeout_s": 5.0}))
        assert answer["error"][0] in ("AddressError", "Unreachable")


# --- the command --------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`blockswarm peers ...` where hivemind and torch do not exist."""
    line = [sys.executable, "-W", "error", "-m", "tests.light_client", "peers", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


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


def test_json(server: Server) -> None:
    server.behave("honest")
    done = command("--light", server.address, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["peers"]) == 4


def test_an_error_is_two_lines_and_code_2(server: Server) -> None:
    server.behave("garbage")
    done = command("--light", server.address, "--timeout", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: this is not a blockswarm frame\n")
    assert len(done.stderr.splitlines()) == 2


def test_ctrl_c_is_no_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{SOMEBODY}"
        line = [sys.executable, "-m", "tests.light_client", "peers", "--light", address]
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
        "from node import cli, cli_light\n"
        "cli.cli.add_command(cli_light.peers)\n"
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
        "import sys, node.cli, node.cli_light\n"
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
    claim = [signed.key, signed.subkey, signed.value, signed.expiration_s]
    assert len(check_claims([tuple(claim)], RUN, NOW_S)[0]) == 1  # type: ignore[list-item]
    part = data.draw(st.integers(0, 3))
    if part == 3:
        claim[3] = signed.expiration_s + data.draw(st.floats(0.001, 500))
    else:
        changed = bytearray(claim[part])  # type: ignore[arg-type]
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place] ^= data.draw(st.integers(1, 255))
        claim[part] = bytes(changed)
    verified, refused = check_claims([tuple(claim)], RUN, NOW_S)  # type: ignore[list-item]
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
