"""Unpacking: members by their names only, and bounded. Only archives of known hash get here."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from node.data import download
from node.data.download import Archive, ArchiveMember, unpack_archive
from protocol.errors import DataError
from tests.support.archive_server import make_zip

ONE = Archive("one", "http://x/one.zip", 0, "", (ArchiveMember("a.txt", 1000),))


def unpack_bytes(packed: bytes, tmp_path: Path, archive: Archive = ONE) -> Path:
    (tmp_path / "one.zip").write_bytes(packed)
    unpack_archive(archive, tmp_path / "one.zip", tmp_path / "text")
    return tmp_path / "text"


def test_unpack_ignores_paths_in_the_archive(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    packed = make_zip({"../../a.txt": b"hello", "/etc/evil": b"no", "../evil": b"no"})
    text = unpack_bytes(packed, inner)
    assert sorted(path.name for path in text.iterdir()) == ["a.txt", download.RECEIPT]
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(
        ["inner", "one.zip", "text", "a.txt", download.RECEIPT]
    )


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (make_zip({"a.txt": bytes(10_000_000)}, zipfile.ZIP_DEFLATED), "more than 1000 bytes"),
        (make_zip({"b.txt": b""}), "0 times"),
        (make_zip({"x/a.txt": b"1", "y/a.txt": b"2"}), "2 times"),
    ],
    ids=["bomb", "missing", "twice"],
)
def test_unpack_refuses(tmp_path: Path, packed: bytes, says: str) -> None:
    with pytest.raises(DataError, match=says):
        unpack_bytes(packed, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one.zip"]
