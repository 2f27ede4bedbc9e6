"""Corpora and their splits."""

from __future__ import annotations

import mmap  # noqa: F401  numpy imports it late, when another user may be unable to
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.data import corpus as data
from node.data.corpus import NAMED, Corpus, lasting_spec, load_corpus
from protocol.errors import DataError

LINES = b"".join(b"line %d of some text\n" % number for number in range(2000))


def whole(corpus: Corpus) -> bytes:
    return b"".join(getattr(corpus, split).tobytes() for split in data.SPLITS)


def test_import_is_light() -> None:
    code = "import sys, node.data.corpus; print('torch' in sys.modules, 'rich' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd()
    )
    assert result.stdout.split() == ["False", "False"]


def test_a_path_lasts_and_a_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "text.txt").write_bytes(LINES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    named = [lasting_spec(spec) for spec in ("text.txt", "./text.txt", "~/text.txt")]
    assert named == [str(tmp_path / "text.txt")] * 3
    assert lasting_spec("./python") == str(tmp_path / "python")
    assert [lasting_spec(name) for name in NAMED] == list(NAMED)
    monkeypatch.chdir("below")
    assert load_corpus(named[0]).size_bytes == len(LINES) and lasting_spec(named[0]) == named[0]


# The named corpora.


def test_python_corpus_is_large_clean_quick_and_repeatable() -> None:
    began = time.perf_counter()
    corpus = load_corpus("python")
    assert time.perf_counter() - began < 5.0  # 0.1 s on an idle machine
    assert 5_000_000 < corpus.size_bytes < 20_000_000
    assert corpus.sha256 == load_corpus("python").sha256
    assert ".".join(map(str, sys.version_info[:3])) in corpus.source
    text = whole(corpus)
    text.decode("utf-8")
    assert b"class OrderedDict" in text
    assert b"class DatetimeTestCase" not in text
    assert str(Path.home()).encode() + b"/" not in text  # no build settings of this host
    assert corpus.valid.size > 0.03 * corpus.size_bytes
    assert corpus.test.size > 0.03 * corpus.size_bytes


def test_python_corpus_splits_share_no_document() -> None:
    corpus = load_corpus("python")
    blocks = [
        {part[i : i + 4096].tobytes() for i in range(0, part.size - 4096, 64)}
        for part in (corpus.valid, corpus.test)
    ]
    assert not blocks[0] & blocks[1]
    train = corpus.train.tobytes()
    for part in (corpus.valid.tobytes(), corpus.test.tobytes()):
        assert not any(part[i : i + 4096] in train for i in range(0, len(part) - 4096, 65536))


# A person's own text.


def test_file_is_cut_at_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_bytes(LINES)
    corpus = load_corpus(str(path))
    assert corpus.name == "own.txt"
    assert whole(corpus) == LINES
    for split in ("train", "valid"):
        assert getattr(corpus, split)[-1] == ord("\n")
    assert corpus.train.size == pytest.approx(0.9 * len(LINES), rel=0.01)
    assert corpus.valid.size == pytest.approx(0.05 * len(LINES), rel=0.1)
    assert not corpus.train.flags.writeable


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=30))
def test_splits_are_a_partition(documents: list[bytes]) -> None:
    joined = b"".join(documents)
    try:
        corpus = data._from_documents("x", "y", documents)
    except DataError:
        assert len(joined) < 20 * 3
        return
    assert whole(corpus) == joined
    assert all(getattr(corpus, split).size for split in data.SPLITS)


def test_folder_is_sorted_counted_and_cut_between_files(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number % 7}").mkdir(exist_ok=True)
        (tmp_path / f"{number % 7}" / f"{number:03}.txt").write_bytes(b"%03d " % number * 50)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    (tmp_path / "copy.txt").write_bytes((tmp_path / "0" / "000.txt").read_bytes())
    (tmp_path / ".hidden").write_bytes(b"hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    corpus = load_corpus(str(tmp_path))
    assert "200 files (left out: 1 binary, 1 repeated, 0 links)" in corpus.source
    text = whole(corpus)
    assert len(text) == 200 * 200
    assert b"hidden" not in text
    assert text.startswith(b"000 007 "[:4])
    assert corpus.train.size % 200 == 0
    assert corpus.valid.size % 200 == 0
    assert load_corpus(str(tmp_path)).sha256 == corpus.sha256
    (tmp_path / "0" / "000.txt").write_bytes(b"changed\n")
    assert load_corpus(str(tmp_path)).sha256 != corpus.sha256


def test_folder_does_not_follow_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_bytes(b"secret " * 100)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own.txt").write_bytes(LINES)
    (folder / "link.txt").symlink_to(outside / "secret.txt")
    (folder / "linked").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    corpus = load_corpus(str(folder))
    assert whole(corpus) == LINES
    assert "3 links" in corpus.source


@pytest.mark.parametrize("pattern", data.SPLIT_PATTERNS)
def test_folder_with_its_own_splits(tmp_path: Path, pattern: str) -> None:
    for split in data.SPLITS:
        (tmp_path / pattern.format(split)).write_bytes(split.encode() * 10)
    (tmp_path / "README.txt").write_bytes(b"not part of it")
    corpus = load_corpus(str(tmp_path))
    for split in data.SPLITS:
        assert getattr(corpus, split).tobytes() == split.encode() * 10

    (tmp_path / pattern.format("valid")).write_bytes(b"train" * 10)
    with pytest.raises(DataError, match="the same file"):
        load_corpus(str(tmp_path))
    (tmp_path / pattern.format("valid")).unlink()
    with pytest.raises(DataError, match="is missing"):
        load_corpus(str(tmp_path))
    (tmp_path / pattern.format("valid")).write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        load_corpus(str(tmp_path))


def test_folder_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(b"%d" % number * 100)
    (tmp_path / "big.bin").write_bytes(bytes(10_000))  # binary files do not count
    monkeypatch.setattr(data, "MAX_FOLDER_BYTES", 500)
    load_corpus(str(tmp_path))
    monkeypatch.setattr(data, "MAX_FOLDER_BYTES", 499)
    with pytest.raises(DataError, match="too much text"):
        load_corpus(str(tmp_path))
    monkeypatch.setattr(data, "MAX_FOLDER_FILES", 5)
    with pytest.raises(DataError, match="more than 5 files"):
        load_corpus(str(tmp_path))
    monkeypatch.setattr(data, "MAX_FILE_BYTES", 99)
    with pytest.raises(DataError, match="GiB"):
        load_corpus(str(tmp_path / "0.txt"))


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "two.txt").write_bytes(b"ab")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe")
    cases = {
        "nowhere.txt": "no such file or folder",
        "empty.txt": "is empty",
        "two.txt": "too short to split",
        "binary": "not a text file",
        "nothing": "no text in the folder",
        "pipe": "neither a file nor a folder",
        "nul\0byte": "no such file or folder",
    }
    for name, says in cases.items():
        with pytest.raises(DataError, match=says) as caught:
            load_corpus(str(tmp_path / name))
        assert "\n" not in caught.value.message
        assert caught.value.hint


@pytest.mark.parametrize("spec", ["", "~nobody-of-this-name/text.txt"])
def test_what_is_no_path_is_not_there(spec: str) -> None:
    """Above all it is not the folder that one happens to stand in."""
    with pytest.raises(DataError) as caught:
        load_corpus(spec)
    assert caught.value.hint


def test_a_misspelt_name_gets_a_suggestion() -> None:
    for wrong in ("wikitext2", "Wikitext-2", "wikitext_2"):
        with pytest.raises(DataError) as caught:
            load_corpus(wrong)
        assert caught.value.hint == "did you mean --data wikitext-2?"
    with pytest.raises(DataError) as caught:
        load_corpus("xyz")
    assert "python" in caught.value.hint


@pytest.fixture
def not_root() -> Iterator[Path]:
    """A folder to work in, and no right to read everything. pytest's own folder is private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        user = os.geteuid()
        os.seteuid(65534 if user == 0 else user)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)


def test_unreadable(not_root: Path) -> None:
    closed = not_root / "closed"
    closed.mkdir()
    (closed / "a.txt").write_bytes(LINES)
    inner = not_root / "outer" / "inner"
    inner.mkdir(parents=True)
    (closed / "a.txt").chmod(0)
    inner.chmod(0)
    for path in (closed / "a.txt", closed, inner, inner.parent, inner / "x.txt"):
        with pytest.raises(DataError, match="cannot read") as caught:
            load_corpus(str(path))
        assert caught.value.hint
    inner.chmod(0o400)  # may be listed, but nothing in it may be touched
    with pytest.raises(DataError, match="cannot read"):
        load_corpus(str(inner))
    inner.chmod(0o700)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", True),
        (b"plain\ttext\r\n", True),
        ("größe".encode("latin-1"), True),
        ("größe 漢字".encode(), True),
        (b"a\x00b", False),
        ("utf-16".encode("utf-16"), False),
        (b"\x01\x02\x03", False),
    ],
)
def test_what_counts_as_text(content: bytes, text: bool) -> None:
    assert data.is_text(content) is text


def test_a_split_shorter_than_a_window_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_bytes(b"some words of text\n" * 40)
    corpus = load_corpus(str(tmp_path / "own.txt"))
    corpus.require_window(16)
    with pytest.raises(DataError, match=r"the valid split of own\.txt has \d+ bytes"):
        corpus.require_window(128)
