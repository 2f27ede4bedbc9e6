"""A host's folder: what is found again, and what damage does not matter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from node.host import home as homes
from node.network.addresses import split_peer
from node.network.discovery import PeerBook
from protocol.errors import UsageError
from protocol.identity import Identity, load_or_create, peer_text
from swarm.run_template import emit, preset
from swarm.runfile import parse, with_start

TEXT = emit(preset("tiny", "My run"))


def address(number: int) -> str:
    peer = peer_text(Identity(bytes([number]) * 32).peer_id)
    return f"/ip4/127.0.0.1/tcp/{4000 + number}/p2p/{peer}"


def test_a_seed_goes_on_with_its_run(tmp_path: Path) -> None:
    text = homes.started(TEXT, tmp_path / "s")
    assert parse(text).started
    assert homes.started(TEXT, tmp_path / "s") == text == homes.started(text, tmp_path / "s")
    with pytest.raises(UsageError, match="holds another run"):
        homes.started(with_start(TEXT, 1_700_000_000), tmp_path / "s")


def test_where_things_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert homes.seed_home("My run") == tmp_path / "blockswarm" / "seed-my-run"
    assert homes.latest_home() is None
    for number, name in enumerate(("old", "new")):
        homes.make(homes.state_home() / name)
        homes.remember(homes.state_home() / name, TEXT, [address(1)])
        for file in (homes.RUN, homes.JOINED):
            os.utime(homes.state_home() / name / file, (number, number))
    assert homes.latest_home() == homes.state_home() / "new"
    assert homes.run_in(homes.state_home() / "old") == TEXT
    assert homes.run_in(tmp_path) is None


def test_a_folder_for_each_host_of_the_machine(tmp_path: Path) -> None:
    first = homes.free_folder(tmp_path / "run")
    held = load_or_create(first / "identity")
    assert homes.in_use(first) and not homes.in_use(tmp_path)
    assert homes.free_folder(tmp_path / "run") == tmp_path / "run-2"
    held.close()
    assert not homes.in_use(first) and homes.free_folder(tmp_path / "run") == first


def test_peers_that_are_remembered(tmp_path: Path) -> None:
    homes.remember(tmp_path, TEXT, [address(1)])
    homes.keep_place(tmp_path, 4002, [address(2)])
    book = PeerBook()
    for number in (3, 4, 5):
        peer, plain = split_peer(address(number))
        book.remember(peer, [plain, "rubbish"])
        if number != 5:  # of which we only heard
            book.standings.spoke(peer)
    (tmp_path / homes.PEERS).write_bytes(book.to_bytes())
    assert homes.known_addresses(tmp_path) == (address(2), address(4), address(3), address(1))
    assert homes.joined_through(tmp_path) == (address(1),)


@pytest.mark.parametrize(
    "rubbish", [b"", b"[", b"[[1]]", b"{}", b'{"met": [7]}', b"7", b"\xff", b"[" * 100_000]
)
def test_damage_is_as_good_as_nothing(tmp_path: Path, rubbish: bytes) -> None:
    homes.keep_place(tmp_path, 4002, [address(2)])
    (tmp_path / homes.PEERS).write_bytes(rubbish)
    assert homes.known_addresses(tmp_path) == (address(2),)
    (tmp_path / homes.INVITATION).write_bytes(rubbish)
    (tmp_path / homes.PORT).write_bytes(rubbish)
    assert homes.known_addresses(tmp_path) == ()
    assert homes.port_of_before(tmp_path, ("127.0.0.1",)) in (0, 7)


def test_workers_peers_count_for_their_host(tmp_path: Path) -> None:
    homes.make(tmp_path / "worker-1")
    homes.keep_place(tmp_path / "worker-1", 4005, [address(5)])
    assert homes.known_addresses(tmp_path) == (address(5),)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot make the folder"):
        homes.make(tmp_path / "file" / "below")
