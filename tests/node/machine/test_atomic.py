"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from node.machine.atomic import (
    HALF,
    StorageError,
    hold_folder,
    remove_halves,
    write_atomically,
    write_together,
)
from tests.support.processes import comes_true


@contextmanager
def full_disk(size_bytes: int = 1000) -> Iterator[None]:
    """Real writes that really fail: no file may grow beyond this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_new_content_replaces_old_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, lambda half: half.write_text("old") and None)
    write_atomically(path, lambda half: half.write_text("new") and None)
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["file"]


def test_kill_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    code = f"""
import os, signal
from pathlib import Path
from node.machine.atomic import write_atomically
def write(half):
    half.write_text("half of the n")
    os.kill(os.getpid(), signal.SIGKILL)
write_atomically(Path({str(path)!r}), write)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2
    others = {".somebody.tmp", ".file.12.tmp", "notes.tmp"}
    for name in others:
        (tmp_path / name).touch()
    with hold_folder(tmp_path):
        assert set(os.listdir(tmp_path)) == {"file", *others}


def test_full_disk_is_named_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with full_disk(), pytest.raises(StorageError, match="the disk is full") as caught:
        write_atomically(path, lambda half: half.write_bytes(bytes(5000)) and None)
    assert str(path) in caught.value.message and caught.value.hint
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_full_disk_under_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("old")
    tensors = {"a": torch.zeros(5000)}
    with full_disk(), pytest.raises(StorageError, match="the disk is full"):
        write_atomically(path, lambda half: save_file(tensors, half))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
def test_every_oserror_becomes_ours_with_the_path(tmp_path: Path, number: int) -> None:
    def fail(half: Path) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError) as caught:
        write_atomically(tmp_path / "file", fail)
    assert str(tmp_path / "file") in caught.value.message and caught.value.hint


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(StorageError, match="cannot write"), hold_folder(folder):
            pass


def test_files_that_belong_together_appear_together(tmp_path: Path) -> None:
    first, last = tmp_path / "weights", tmp_path / "manifest"
    write_together({first: lambda h: h.write_text("1") and None,
                    last: lambda h: h.write_text("1") and None})  # fmt: skip

    def fail(half: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(StorageError):
        write_together({first: lambda h: h.write_text("2") and None, last: fail})
    assert (first.read_text(), last.read_text()) == ("1", "1")
    assert sorted(os.listdir(tmp_path)) == ["manifest", "weights"]


def test_a_folder_has_one_holder(tmp_path: Path) -> None:
    with (
        hold_folder(tmp_path),
        pytest.raises(StorageError, match="another process"),
        hold_folder(tmp_path),
    ):
        pass
    with hold_folder(tmp_path):
        pass


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    """Also what safetensors calls its own unfinished files; nothing of other programs."""
    code = (
        "import sys, numpy, safetensors.numpy as s\n"
        "s.save_file({'w': numpy.zeros(60_000_000)}, sys.argv[1])\n"
    )
    target = tmp_path / f".w.safetensors.77{HALF}"
    writing = subprocess.Popen([sys.executable, "-c", code, str(target)])
    try:
        assert comes_true(lambda: list(tmp_path.glob(".tmp*")) or target.exists(), 30.0)
    finally:
        writing.kill()
        writing.wait()
    for name in (".tmpnot-ours", ".tmpAbC12", "notes.tmp", ".tmpIljCxv", f".x{HALF}"):
        (tmp_path / name).touch()
    remove_halves(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".tmpAbC12",
        ".tmpnot-ours",
        "notes.tmp",
    ]
