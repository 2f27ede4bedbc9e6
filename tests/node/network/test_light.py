"""The light client: py-libp2p against a real p2pd, in processes of their own (light_processes)."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from protocol.frames import content_digest
from tests.support.light_processes import SOMEBODY, JsonProcess, Server, needs_libp2p

pytestmark = needs_libp2p

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
    child = JsonProcess("-W", "error", "-m", "tests.support.light_client")
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
        ("other_version", "VersionMismatch", "protocol 3.0"),
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
    assert answer["error"][0] == "AddressError"
    assert "a" * 64 in answer["message"]


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
