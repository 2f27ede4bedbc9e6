"""Unpacking: members by their names only, bounded, checked, whatever the archive is."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.data import download
from node.data.download import Archive, Member, unpack
from protocol.errors import DataError
from tests.support.archive_server import make_zip

ONE = Archive("one", "http://x/one.zip", 0, "", (Member("a.txt", 1000),))


def unpack_bytes(packed: bytes, tmp_path: Path, archive: Archive = ONE) -> Path:
    (tmp_path / "one.zip").write_bytes(packed)
    unpack(archive, tmp_path / "one.zip", tmp_path / "text")
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
        (make_zip({"a.txt": b"1"}, zipfile.ZIP_LZMA), "compressed in a way"),
        (make_zip({"a.txt": b"hello"}).replace(b"hello", b"jello", 1), "CRC"),
        (b"", "not a usable zip"),
        (b"<html>log in</html>", "not a usable zip"),
        (make_zip({"a.txt": b"hello"})[:-10], "not a usable zip"),
    ],
    ids=["bomb", "missing", "twice", "method", "crc", "empty", "html", "truncated"],
)
def test_unpack_refuses(tmp_path: Path, packed: bytes, says: str) -> None:
    with pytest.raises(DataError, match=says):
        unpack_bytes(packed, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one.zip"]


def test_unpack_checks_a_member_that_has_a_hash(tmp_path: Path) -> None:
    archive = replace(ONE, members=(Member("a.txt", 1000, hashlib.sha256(b"hello").hexdigest()),))
    with pytest.raises(DataError, match="not the original"):
        unpack_bytes(make_zip({"a.txt": b"jello"}), tmp_path, archive)
    assert (unpack_bytes(make_zip({"a.txt": b"hello"}), tmp_path, archive) / "a.txt").exists()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=8),
    keep=st.integers(0, 400),
)
def test_unpack_of_damaged_archives_never_crashes(
    tmp_path: Path, edits: list[tuple[int, int]], keep: int
) -> None:
    packed = bytearray(make_zip({"x/a.txt": b"hello" * 20}, zipfile.ZIP_DEFLATED))
    for offset, value in edits:
        packed[offset % len(packed)] = value
    if keep < 300:
        packed = packed[: max(keep, 1)] if keep % 3 == 0 else packed
    try:
        text = unpack_bytes(bytes(packed), tmp_path)
    except DataError:
        return
    assert (text / "a.txt").read_bytes() == b"hello" * 20
    for path in text.iterdir():
        path.unlink()
    text.rmdir()
