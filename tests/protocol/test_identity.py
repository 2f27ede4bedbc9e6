"""The identity file: what is written, what is refused, who holds the lock."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import identity as module
from protocol.errors import IdentityError
from protocol.identity import (
    Identity,
    IdentityDamaged,
    IdentityInUse,
    IdentityReadable,
    load_or_create,
    new_identity,
    peer_from_text,
    peer_id_of,
    peer_text,
    public_key_of,
    verify,
)
from protocol.packing import Malformed
from tests.support.paths import ROOT


def test_created_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity"
    first = load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == 68
    assert sorted(p.name for p in path.parent.iterdir()) == ["identity", "identity.lock"]
    first.close()
    second = load_or_create(path)
    assert second.peer_id == first.peer_id
    second.close()


def test_signatures_belong_to_the_peer_id() -> None:
    mine, other = new_identity(), new_identity()
    signature = mine.sign(b"message")
    assert verify(mine.peer_id, signature, b"message")
    assert not verify(mine.peer_id, signature, b"massage")
    assert not verify(other.peer_id, signature, b"message")
    assert not verify(mine.peer_id, b"short", b"message")


@given(st.binary(min_size=32, max_size=32))
def test_peer_id_text_round_trip(public_key: bytes) -> None:
    peer_id = peer_id_of(public_key)
    text = peer_text(peer_id)
    assert text.startswith("12D3Koo")
    assert peer_from_text(text) == peer_id
    assert public_key_of(peer_id) == public_key


def test_base58_agrees_with_the_library() -> None:
    base58 = pytest.importorskip("base58")  # hivemind and py-libp2p bring it; we have our own
    for _ in range(20):
        peer_id = new_identity().peer_id
        assert peer_text(peer_id) == base58.b58encode(peer_id).decode()


@pytest.mark.parametrize("text", ["", "1", "0OIl", "12D3Koo", "1" * 52, "z" * 52, "z" * 10**6, "é"])
def test_bad_peer_texts(text: str) -> None:
    with pytest.raises(Malformed):
        peer_from_text(text)


@pytest.mark.parametrize("peer_id", [b"", b"\x00\x24", b"\x12\x20" + bytes(32), bytes(38)])
def test_foreign_peer_ids(peer_id: bytes) -> None:
    with pytest.raises(Malformed):
        public_key_of(peer_id)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_readable_by_others(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity"
    load_or_create(path).close()
    path.chmod(mode)
    with pytest.raises(IdentityReadable) as caught:
        load_or_create(path)
    assert caught.value.hint == f"chmod 600 {path}"
    path.chmod(0o600)
    load_or_create(path).close()  # the failed start left no lock behind


def damage(data: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "cut": data[:-1],
        "longer": data + b"\0",
        "rsa": b"\x08\x00" + data[2:],
        "public key of another": data[:36] + new_identity().to_bytes()[36:],
        "one bit": data[:20] + bytes([data[20] ^ 1]) + data[21:],
    }


@pytest.mark.parametrize("name", list(damage(bytes(68))))
def test_damaged(tmp_path: Path, name: str) -> None:
    path = tmp_path / "identity"
    load_or_create(path).close()
    path.write_bytes(damage(path.read_bytes())[name])
    with pytest.raises(IdentityDamaged, match="identity"):
        load_or_create(path)


def test_neither_directory_nor_fifo(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    with pytest.raises(IdentityError):
        load_or_create(tmp_path / "folder")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(IdentityDamaged, match="regular"):
        load_or_create(tmp_path / "fifo")


def test_unusable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="cannot use"):
        load_or_create(tmp_path / "file" / "identity")


def test_in_use_within_one_process(tmp_path: Path) -> None:
    held = load_or_create(tmp_path / "identity")
    with pytest.raises(IdentityInUse):
        load_or_create(tmp_path / "identity")
    held.close()
    held.close()  # twice is harmless
    load_or_create(tmp_path / "identity").close()


HOLDER = """
import sys
from protocol.identity import load_or_create
from tests.support.paths import ROOT
held = load_or_create(sys.argv[1])
print(held.text, flush=True)
sys.stdin.read()
"""


def test_in_use_until_the_other_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        text = process.stdout.readline().strip()
        with pytest.raises(IdentityInUse) as caught:
            load_or_create(path)
        assert "--folder" in caught.value.hint
        process.send_signal(signal.SIGKILL)
        process.wait()
        mine = load_or_create(path)
        assert mine.text == text
        mine.close()


@pytest.mark.parametrize("step", ["fsync", "link", "fdopen"])
def test_crash_while_creating_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "identity"

    def crash(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.os, step, crash)
        with pytest.raises(KeyboardInterrupt):
            load_or_create(path)
    assert not path.exists()
    load_or_create(path).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["identity", "identity.lock"]


def test_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(module.os, "link", no_links)
    identity = load_or_create(tmp_path / "identity")
    assert Identity.from_bytes((tmp_path / "identity").read_bytes()).peer_id == identity.peer_id
    identity.close()


def test_the_seed_is_in_no_text() -> None:
    identity = new_identity()
    assert repr(identity) == f"Identity({identity.text})"
