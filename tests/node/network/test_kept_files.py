"""Files that are kept from time to time: taken on the loop, written beside it, whole or not."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from node.machine.atomic import StorageError
from node.network import kept_files
from node.network.kept_files import KeptFiles
from tests.support.loopback import until


def test_what_is_kept_is_what_was_there_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk: the loop goes on, and what changes meanwhile is not in the file."""
    disk = threading.Event()
    loop_thread = threading.get_ident()
    writers: list[int] = []

    said = [b"before"]

    def slow_fill(data: bytes, half: Path) -> None:
        writers.append(threading.get_ident())
        assert disk.wait(30)
        half.write_bytes(data)

    monkeypatch.setattr(kept_files, "_fill", slow_fill)

    async def main() -> None:
        kept = KeptFiles(tmp_path)
        kept.keep("a.json", lambda: said[0])
        kept.keep("nothing.json", lambda: None)
        saving = asyncio.create_task(kept.save())
        await until(lambda: bool(writers))  # the loop is free while the disk is not
        said[0] = b"after"
        disk.set()
        await saving

    asyncio.run(main())
    assert writers == [writers[0]] and writers[0] != loop_thread
    assert (tmp_path / "a.json").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_without_a_folder_nothing_is_kept_and_a_bad_one_is_named(tmp_path: Path) -> None:
    nowhere = KeptFiles(None)
    nowhere.keep("a.json", lambda: b"x")
    nowhere.save_now()
    (tmp_path / "file").write_bytes(b"")
    bad = KeptFiles(tmp_path / "file")
    bad.keep("a.json", lambda: b"x")
    with pytest.raises(StorageError):
        bad.save_now()
    with pytest.raises(StorageError):
        asyncio.run(bad.save())
