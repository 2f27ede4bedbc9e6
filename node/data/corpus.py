"""Corpora: the named ones (`python`, `wikitext-2`, `wikitext-103`) and a user's own file or folder.

Splits never overlap. WikiText and a folder with train, valid and test files bring their own;
anything else is put in a fixed order and cut into contiguous ranges of 90, 5 and 5 percent, at the
end of a file where one ends nearby, otherwise at the end of a line.

Every corpus is identified by a sha256 over its splits. `python` is the library of the running
Python, so its hash differs from one patch version to the next; figures state it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import stat
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from node.data import download
from node.data.windows import Bytes, check_window
from protocol.errors import DataError

SPLITS = ("train", "valid", "test")
NAMED = ("python", "wikitext-2", "wikitext-103")
SPLIT_PATTERNS = ("{}.txt", "wiki.{}.raw", "wiki.{}.tokens")

VALID_FROM, TEST_FROM = 0.90, 0.95
SNAP = 0.01
"""A cut moves to the end of a file if one lies within this fraction of the corpus."""

MAX_FOLDER_FILES = 200_000
MAX_FOLDER_BYTES = 2 << 30
MAX_FILE_BYTES = 64 << 30
SNIFF_BYTES = 8192
CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b"))
"""Control characters that are rare in text."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Three splits that do not overlap. Files are memory-mapped, so only what is used is loaded.

    Known limit: truncating a mapped file during training kills the process; do not edit a corpus
    in use.
    """

    name: str
    source: str
    sha256: str
    train: Bytes
    valid: Bytes
    test: Bytes

    @property
    def size_bytes(self) -> int:
        return self.train.size + self.valid.size + self.test.size

    def require_window(self, window: int) -> None:
        """Refuse a corpus with a split too short for one window, before any work is done."""
        for split in SPLITS:
            check_window(getattr(self, split), window, f"the {split} split of {self.name}")


def load_corpus(
    spec: str, cache: Path | None = None, progress: download.Progress = download.silent
) -> Corpus:
    """Load what `--data SPEC` names: a name from `NAMED`, or the path of a file or folder.

    A name takes precedence over a path of the same name; `./python` is the path.
    """
    if spec == "python":
        return python_corpus()
    if spec in NAMED:
        archive = download.WIKITEXT_2 if spec == "wikitext-2" else download.WIKITEXT_103
        return archive_corpus(archive, cache, progress)
    if not spec:
        raise DataError("no text was named", f"--data PATH, or one of {', '.join(NAMED)}")
    try:
        path = Path(spec).expanduser()
        mode = path.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:  # the last: no home of such a user
        raise _no_such(spec, error) from error
    try:
        if stat.S_ISDIR(mode):
            return folder_corpus(path)
        if stat.S_ISREG(mode):
            return file_corpus(path)
    except OSError as error:
        raise _unreadable(error.filename or path, error) from error
    raise DataError(f"{spec} is neither a file nor a folder", "give a text file or a folder")


def lasting_spec(spec: str) -> str:
    """The spec with a path made absolute, so that it is valid from any folder."""
    return spec if spec in NAMED else str(Path(spec).expanduser().absolute())


def _no_such(spec: str, error: Exception) -> DataError:
    if isinstance(error, PermissionError):
        return _unreadable(spec, error)
    near = difflib.get_close_matches(spec.lower(), NAMED, n=1)
    hint = f"did you mean --data {near[0]}?" if near else f"a path, or one of {', '.join(NAMED)}"
    return DataError(f"no such file or folder: {spec!r}", hint)


def _unreadable(path: Path | str, error: OSError) -> DataError:
    return DataError(f"cannot read {path}: {error.strerror}", "check its owner and mode")


# The named corpora.


def python_corpus() -> Corpus:
    """The text of this Python's own library, about 10 MB, with no download.

    The help texts of `pydoc` come first: they repeat one another, so they are kept together, in
    the train split. The sources of the standard library follow in the order of the sha256 of their
    relative paths, so that each split has some of every kind. Left out: tests, character tables,
    and what is not part of the library, such as site-packages and build settings.
    """
    documents = [_pydoc_topics(), *_library_sources(Path(sysconfig.get_path("stdlib")))]
    if sum(map(len, documents)) < 1 << 20:
        raise DataError(
            "this Python comes without the sources of its library", "give a path: --data PATH"
        )
    version = ".".join(map(str, sys.version_info[:3]))
    source = f"the library of Python {version}, {len(documents)} documents"
    return _from_documents("python", source, documents)


def _pydoc_topics() -> bytes:
    try:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return b""
    return "\n".join(topics[key] for key in sorted(topics)).encode()


def _library_sources(library: Path) -> list[bytes]:
    left_out = {"test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
    found: list[tuple[bytes, Path]] = []
    for folder, subfolders, files in os.walk(library):
        top = Path(folder) == library
        known = sys.stdlib_module_names if top else set(subfolders)
        subfolders[:] = [name for name in subfolders if name in known and name not in left_out]
        for name in files:
            if name.endswith(".py") and (not top or name[:-3] in sys.stdlib_module_names):
                path = Path(folder, name)
                relative = path.relative_to(library).as_posix()
                found.append((hashlib.sha256(relative.encode()).digest(), path))
    try:
        return _without_repeats([path.read_bytes() for _, path in sorted(found)])
    except OSError as error:
        raise DataError(f"cannot read the library of Python: {error}") from error


def archive_corpus(
    archive: download.Archive,
    cache: Path | None = None,
    progress: download.Progress = download.silent,
) -> Corpus:
    """A corpus from the cache, downloaded if missing. Its files are hashed at every start."""
    folder = download.ensure_unpacked(archive, cache, progress)
    expected = download.read_receipt(folder)
    files = {split: folder / f"wiki.{split}.raw" for split in SPLITS}
    corpus, hashes = _from_split_files(archive.name, f"{archive.file_name} (raw)", files)
    for split, path in files.items():
        if hashes[split] != expected.get(path.name):
            raise DataError(f"{path} was altered (its sha256 differs)", f"remove {folder}")
    return corpus


# A person's own text.


def file_corpus(path: Path) -> Corpus:
    """One file, memory-mapped and split at ends of lines."""
    data = _map_file(path)
    if not is_text(data[:SNIFF_BYTES].tobytes()):
        raise DataError(f"{path} is not a text file", "give UTF-8 text, or a folder of text files")
    return _from_bytes(_name(path), f"the file {path}", data, file_ends=())


def folder_corpus(path: Path) -> Corpus:
    """A folder with its own train, valid and test files, or all text files in it, sorted by path.

    Left out, and counted in `source`: binary files, repeats of the same content (they could end up
    in two splits), and all links. Names that begin with a dot are ignored.
    """
    files = _split_files(path)
    if files is not None:
        names = ", ".join(file.name for file in files.values())
        corpus, _ = _from_split_files(_name(path), f"the folder {path} ({names})", files)
        return corpus
    paths, links = _walk(path)
    documents, binary, total = [], 0, 0
    for file in paths:
        content = _read_text(file, MAX_FOLDER_BYTES - total)
        if content is None:
            binary += 1
        else:
            documents.append(content)
            total += len(content)
    kept = _without_repeats(documents)
    left_out = f"left out: {binary} binary, {len(documents) - len(kept)} repeated, {links} links"
    if not any(kept):
        raise DataError(f"no text in the folder {path} ({left_out})", "give UTF-8 text files")
    return _from_documents(_name(path), f"the folder {path}, {len(kept)} files ({left_out})", kept)


def _name(path: Path) -> str:
    """The last part of a path; `.` and `..` are resolved first."""
    return path.resolve().name or str(path)


def is_text(beginning: bytes) -> bool:
    """Whether it has no NUL and at most 1% other control characters. Any 8-bit encoding passes."""
    controls = len(beginning) - len(beginning.translate(None, CONTROLS))
    return 0 not in beginning and controls * 100 <= len(beginning)


def _walk(root: Path) -> tuple[list[Path], int]:
    """All regular files below `root`, sorted by relative path, and the number of skipped links."""
    found: list[tuple[str, Path]] = []
    links = 0

    def refuse(error: OSError) -> None:
        raise _unreadable(error.filename, error) from error

    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        links += sum(Path(folder, name).is_symlink() for name in subfolders)
        for name in files:
            path = Path(folder, name)
            if path.is_symlink():
                links += 1
            elif not name.startswith(".") and path.is_file():
                found.append((path.relative_to(root).as_posix(), path))
        if len(found) > MAX_FOLDER_FILES:
            raise DataError(
                f"the folder {root} has more than {MAX_FOLDER_FILES} files", "name a smaller one"
            )
    return [path for _, path in sorted(found)], links


def _split_files(folder: Path) -> dict[str, Path] | None:
    """The split files of a folder that is already split; None if it is not."""
    for pattern in SPLIT_PATTERNS:
        files = {split: folder / pattern.format(split) for split in SPLITS}
        missing = [p.name for p in files.values() if p.is_symlink() or not p.is_file()]
        if not missing:
            return files
        if len(missing) == 1:
            raise DataError(
                f"{folder} looks like a corpus with its own splits, but {missing[0]} is missing",
                "add it (a link does not count), or rename the other two",
            )
    return None


# Reading and cutting.


def _read_text(path: Path, limit_bytes: int) -> bytes | None:
    """A file's bytes, or None if it is binary. Never follows a link or waits for a pipe."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            content = file.read(SNIFF_BYTES)
            if not is_text(content):
                return None
            content += file.read(max(0, limit_bytes - len(content)) + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(content) > limit_bytes:
        raise DataError(
            f"too much text: the limit is passed at {path}",
            "put the text into one file, which is mapped instead of read",
        )
    return content


def _map_file(path: Path) -> Bytes:
    try:
        size_bytes = path.stat().st_size
        if size_bytes == 0:
            raise DataError(f"{path} is empty", "give a file with text in it")
        if size_bytes > MAX_FILE_BYTES:
            raise DataError(f"{path} has more than {MAX_FILE_BYTES >> 30} GiB", "give a part of it")
        # A plain array over the map: indexing the memmap class itself costs several times more.
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise _unreadable(path, error) from error


def _without_repeats(documents: Sequence[bytes]) -> list[bytes]:
    """Each distinct document once, in the order of first appearance."""
    return list(dict.fromkeys(documents))


def _from_documents(name: str, source: str, documents: Sequence[bytes]) -> Corpus:
    joined = np.frombuffer(b"".join(documents), dtype=np.uint8)
    ends = np.cumsum([len(document) for document in documents])
    return _from_bytes(name, source, joined, ends.tolist())


def _from_bytes(name: str, source: str, data: Bytes, file_ends: Sequence[int]) -> Corpus:
    valid_from = _cut(data, VALID_FROM, file_ends)
    test_from = _cut(data, TEST_FROM, file_ends)
    if not 0 < valid_from < test_from < data.size:
        raise DataError(f"{name} is too short to split ({data.size} bytes)", "give more text")
    parts = (data[:valid_from], data[valid_from:test_from], data[test_from:])
    hashes = _hashes(parts)
    source += f"; split 90/5/5 at bytes {valid_from} and {test_from}"
    return Corpus(name, source, _corpus_hash(hashes), *parts)


def _cut(data: Bytes, fraction: float, file_ends: Sequence[int]) -> int:
    """Where a split begins: the nearest end of a file, else of a line, else the exact byte."""
    ideal, reach = int(data.size * fraction), int(data.size * SNAP)
    near = [end for end in file_ends if abs(end - ideal) <= reach and 0 < end < data.size]
    if near:
        return min(near, key=lambda end: abs(end - ideal))
    newlines = np.flatnonzero(data[ideal : ideal + min(reach, 1 << 16)] == ord("\n"))
    return ideal + int(newlines[0]) + 1 if newlines.size else ideal


def _from_split_files(
    name: str, source: str, files: Mapping[str, Path]
) -> tuple[Corpus, dict[str, str]]:
    parts = [_map_file(files[split]) for split in SPLITS]
    hashes = _hashes(parts)
    if len(set(hashes.values())) < len(SPLITS):
        raise DataError(f"two splits of {name} are the same file", "give each split its own text")
    return Corpus(name, source, _corpus_hash(hashes), *parts), hashes


def _hashes(parts: Sequence[Bytes]) -> dict[str, str]:
    digests = (hashlib.sha256(part.data).hexdigest() for part in parts)
    return dict(zip(SPLITS, digests, strict=True))


def _corpus_hash(hashes: Mapping[str, str]) -> str:
    lines = "".join(f"{split} {hashes[split]}\n" for split in SPLITS)
    return hashlib.sha256(lines.encode()).hexdigest()
