"""Atomic and durable file writes, and a lock that gives a folder a single writer.

A failure becomes a `StorageError` that says what a person can do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from protocol.errors import BlockswarmError

Write = Callable[[Path], None]

HALF = ".blockswarm.tmp"
"""Ending of the names of our unfinished files, to tell them from files of other programs."""


SAFETENSORS_HALF = ".tmp" + 6 * "[0-9A-Za-z]"
"""Names of the files that safetensors fills before it renames them."""


class StorageError(BlockswarmError):
    """A file could not be written: the disk is full, or the folder not writable or in use."""


def write_atomically(path: Path, write: Write) -> None:
    """Let `write` fill a temporary file beside `path`, sync it, then rename it to `path`."""
    write_together({path: write})


def write_together(files: Mapping[Path, Write]) -> None:
    """Write files of one folder that belong together; the last one marks the set as complete.

    All are complete and durable under temporary names before any is renamed. The old last file is
    removed first and the new one appears last, so that it is only ever found with its own set.
    """
    halves = {path: _half(path) for path in files}
    *_, last = files
    try:
        with _as_storage_error(last):
            last.parent.mkdir(parents=True, exist_ok=True)
            for path, write in files.items():
                write(halves[path])
                _sync(halves[path])
            if len(files) > 1:
                last.unlink(missing_ok=True)
            for path, half in halves.items():
                half.replace(path)
            _sync(last.parent)  # the renames themselves must survive a power cut
    finally:
        for half in halves.values():
            _remove_quietly(half)


def remove_file(path: Path) -> None:
    with _as_storage_error(path):
        path.unlink(missing_ok=True)


def remove_halves(folder: Path) -> None:
    """Remove what a killed process left half-written. Only while nothing is being written there."""
    for pattern in (f".*{HALF}", SAFETENSORS_HALF):
        for left in folder.glob(pattern):
            _remove_quietly(left)


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Create the folder and hold an exclusive lock on it, which ends with the process at latest.

    Half-written files that a killed process left there are removed.
    """
    with _as_storage_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"another process is training in {folder}", "wait for it, or choose another folder"
            ) from error
        except OSError:
            pass  # a file system without locks: go on without one
        remove_halves(folder)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _as_storage_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _storage_error(path, error.strerror or str(error), error.errno) from error
    except SafetensorError as error:  # it reports a failed write in words only
        number = re.search(r"os error (\d+)", str(error))
        raise _storage_error(path, str(error), int(number[1]) if number else None) from error


def _storage_error(path: Path, reason: str, number: int | None) -> StorageError:
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageError(
            f"cannot write {path}: the disk is full",
            "free some space; what was saved before is whole",
        )
    hint = "choose a folder that you may write to"
    if number in (errno.ENOTDIR, errno.EEXIST):
        hint = "choose a folder; there is a file of that name"
    return StorageError(f"cannot write {path}: {reason}", hint)


def _half(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{HALF}")


def _remove_quietly(path: Path) -> None:
    with suppress(OSError):  # must not hide the error that is being raised
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
