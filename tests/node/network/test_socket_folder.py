"""The folders of sockets: private, and swept when their daemon was killed; nothing else is."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from node.network import socket_folder

LONG_AGO = 1_000_000_000


def socket_at(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.bind(str(path))
    return found


def folder_of(parent: Path, name: str) -> Path:
    folder = parent / f"{socket_folder.PREFIX}{name}"
    folder.mkdir(mode=0o700)
    return folder


def aged(folder: Path) -> Path:
    os.utime(folder, (LONG_AGO, LONG_AGO))
    return folder


def test_only_what_a_dead_daemon_left_is_removed(tmp_path: Path) -> None:
    dead = folder_of(tmp_path, "dead")
    for name in (socket_folder.CONTROL, socket_folder.INCOMING):
        socket_at(dead / name).close()
    empty = folder_of(tmp_path, "empty")
    live = folder_of(tmp_path, "live")
    socket_at(live / socket_folder.INCOMING).close()
    daemon = socket_at(live / socket_folder.CONTROL)
    daemon.listen()
    other = folder_of(tmp_path, "other")  # somebody's data that happens to be called so
    (other / "notes.txt").write_text("mine")
    file = folder_of(tmp_path, "file")
    (file / socket_folder.CONTROL).write_text("no socket")
    link = tmp_path / f"{socket_folder.PREFIX}link"
    link.symlink_to(tmp_path, target_is_directory=True)
    foreign = tmp_path / "elsewhere"
    foreign.mkdir()
    for each in (dead, empty, live, other, file, foreign):
        aged(each)
    young = folder_of(tmp_path, "young")

    assert socket_folder.sweep(tmp_path) == 2
    assert not dead.exists() and not empty.exists()
    kept = (live, other, file, link, foreign, young)
    assert all(each.exists() for each in kept)
    daemon.close()
    aged(live)
    assert socket_folder.sweep(tmp_path) == 1 and not live.exists()


def test_a_new_folder_is_private_and_sweeps_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="bs") as short:  # pytest's own may be too long
        parent = Path(short)
        monkeypatch.setattr(tempfile, "tempdir", short)
        left = folder_of(parent, "left")
        socket_at(left / socket_folder.INCOMING).close()
        aged(left)
        made = socket_folder.make_socket_folder()
        assert made.parent == parent and made.stat().st_mode & 0o777 == 0o700
        assert not left.exists()


def test_a_path_that_is_too_long_for_a_socket_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    made = socket_folder.make_socket_folder()
    assert len(str(made)) < 90 and not list(deep.iterdir())
    made.rmdir()


def test_a_folder_that_cannot_be_read_is_left(tmp_path: Path) -> None:
    assert socket_folder.sweep(tmp_path / "nowhere") == 0
