"""Downloads against a real HTTP server on loopback, with the faults that real servers have."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from node.data import download
from node.data.corpus import archive_corpus
from node.data.download import Archive, ArchiveMember, ensure_unpacked
from protocol.errors import DataError
from tests.support.archive_server import OTHER, PACKED, SPLITS, Fault, Handler, Script, Server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    running = Server(("127.0.0.1", 0), Handler)
    running.script = Script()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def archive_at(server: Server) -> Archive:
    return Archive(
        name="wikitext-x",
        url=f"http://127.0.0.1:{server.server_port}/some/wikitext-x.zip",
        size_bytes=len(PACKED),
        sha256=hashlib.sha256(PACKED).hexdigest(),
        members=tuple(ArchiveMember(name, len(content)) for name, content in SPLITS.items()),
    )


class Pauses(list[float]):
    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def fetch(server: Server, cache: Path, progress: download.Progress = download.silent) -> Path:
    return ensure_unpacked(archive_at(server), cache, progress, Pauses())


def assert_complete(text: Path) -> None:
    assert {path.name for path in text.iterdir()} == {*SPLITS, download.RECEIPT}
    for name, content in SPLITS.items():
        assert (text / name).read_bytes() == content
    # Nothing is left behind but the lock.
    assert {path.name for path in text.parent.iterdir()} == {"lock", "text"}


def part_of(cache: Path) -> Path:
    return cache / "wikitext-x" / "wikitext-x.zip.part"


def earlier_part(cache: Path, content: bytes) -> Path:
    """What a process that ended in the middle of its download left behind."""
    part = part_of(cache)
    part.parent.mkdir(parents=True)
    part.write_bytes(content)
    return part


def test_full_download_reports_progress(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    text = fetch(server, tmp_path, lambda *report: seen.append(report))
    assert_complete(text)
    transfer = [(done, total) for what, done, total in seen if what.startswith("downloading")]
    assert transfer[-1] == (len(PACKED), len(PACKED))
    assert transfer == sorted(transfer)
    corpus = archive_corpus(archive_at(server), tmp_path)
    assert corpus.train.tobytes() == SPLITS["wiki.train.raw"]
    assert len(server.script.requests) == 1  # the second use came from the cache


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.RESET])
def test_resumes_after_a_cut_connection(server: Server, tmp_path: Path, fault: Fault) -> None:
    server.script.faults = [fault, fault, Fault.NONE]
    assert_complete(fetch(server, tmp_path))
    ranges = [request.get("Range") for request in server.script.requests]
    assert ranges[0] is None
    assert len(ranges) == 3
    if fault is Fault.CUT:  # a reset may lose what was still in the socket's buffer
        assert ranges[1] == f"bytes={len(PACKED) // 2}-"


def test_resumes_in_another_process(server: Server, tmp_path: Path) -> None:
    """A cut followed by silence ends the first call; what had arrived serves the second."""
    server.script.faults = [Fault.CUT, Fault.OVERLOADED]
    with pytest.raises(DataError, match="503"):
        fetch(server, tmp_path)
    kept = part_of(tmp_path).stat().st_size
    assert 0 < kept < len(PACKED)
    server.script = Script()
    assert_complete(fetch(server, tmp_path))
    assert server.script.requests[0]["Range"] == f"bytes={kept}-"


def test_pauses_grow_while_nothing_arrives(server: Server, tmp_path: Path) -> None:
    server.script.faults = [Fault.CUT, Fault.OVERLOADED]
    pauses = Pauses()
    with pytest.raises(DataError):
        ensure_unpacked(archive_at(server), tmp_path, pause=pauses)
    assert pauses == [1.0, *download.RETRY_PAUSES_S]


@pytest.mark.parametrize("fault", [Fault.NO_RANGE, Fault.WRONG_RANGE, Fault.NOT_SATISFIABLE])
def test_restarts_when_a_server_cannot_resume(server: Server, tmp_path: Path, fault: Fault) -> None:
    server.script.faults = [Fault.CUT, fault, Fault.NONE]
    assert_complete(fetch(server, tmp_path))


@pytest.mark.parametrize("fault", [Fault.NO_RANGE, Fault.WRONG_RANGE, Fault.NOT_SATISFIABLE])
def test_restarts_a_part_of_an_earlier_process(
    server: Server, tmp_path: Path, fault: Fault
) -> None:
    earlier_part(tmp_path, PACKED[:5000])
    server.script.faults = [fault, Fault.NONE]
    assert_complete(fetch(server, tmp_path))


def test_joined_versions_are_noticed_by_their_hash(server: Server, tmp_path: Path) -> None:
    earlier_part(tmp_path, OTHER[:5000])
    assert_complete(fetch(server, tmp_path))
    assert [request.get("Range") for request in server.script.requests] == ["bytes=5000-", None]


def test_killed_before_the_rename(server: Server, tmp_path: Path) -> None:
    part = earlier_part(tmp_path, PACKED)
    (part.parent / "text.partial").mkdir()
    (part.parent / "text.partial" / "half").write_bytes(b"x")
    assert_complete(fetch(server, tmp_path))
    assert server.script.requests == []


def test_part_that_is_too_long_is_dropped(server: Server, tmp_path: Path) -> None:
    earlier_part(tmp_path, PACKED + b"x")
    assert_complete(fetch(server, tmp_path))


@pytest.mark.parametrize(("begun", "requests"), [(b"", 1), (bytes(5000), 2)])
def test_checksum_mismatch(server: Server, tmp_path: Path, begun: bytes, requests: int) -> None:
    earlier_part(tmp_path, begun)
    server.script.body = OTHER
    with pytest.raises(DataError, match="sha256 is not that of the original"):
        fetch(server, tmp_path)
    assert len(server.script.requests) == requests
    assert not part_of(tmp_path).exists()
    assert not (tmp_path / "wikitext-x" / "text").exists()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault.MISSING, "HTTP 404"),
        (Fault.OVERLOADED, "HTTP 503"),
        (Fault.LONGER, f"offers {len(PACKED) + 10} bytes"),
        (Fault.SHORTER, f"offers {len(PACKED) - 10} bytes"),
        (Fault.ENDLESS, "more than"),
    ],
)
def test_refused_at_once(server: Server, tmp_path: Path, fault: Fault, says: str) -> None:
    server.script.faults = [fault]
    with pytest.raises(DataError, match=says):
        fetch(server, tmp_path)
    assert len(server.script.requests) == 1
    assert not part_of(tmp_path).exists()


def test_no_content_length(server: Server, tmp_path: Path) -> None:
    server.script.faults = [Fault.UNSIZED]
    assert_complete(fetch(server, tmp_path))


def test_no_network_says_what_to_do(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/wikitext-x.zip"
        archive = replace(archive_at(server), url=url)
        with pytest.raises(DataError, match="no connection") as caught:
            ensure_unpacked(archive, tmp_path)
    by_hand = tmp_path / "wikitext-x" / "wikitext-x.zip"
    for needed in ("--data PATH", "--data python", str(by_hand), url, archive.sha256):
        assert needed in caught.value.hint
    assert "\n" not in caught.value.message

    # ... and doing it by hand works, without the network, and keeps the person's file.
    by_hand.write_bytes(OTHER)
    with pytest.raises(DataError, match="not the original"):
        ensure_unpacked(archive, tmp_path)
    by_hand.write_bytes(PACKED)
    text = ensure_unpacked(archive, tmp_path)
    assert (text / "wiki.test.raw").read_bytes() == SPLITS["wiki.test.raw"]
    assert by_hand.exists()


def test_only_http_addresses(server: Server, tmp_path: Path) -> None:
    archive = replace(archive_at(server), url="file:///etc/hostname")
    with pytest.raises(DataError, match="not an http address"):
        ensure_unpacked(archive, tmp_path)


def test_two_at_once_download_once(server: Server, tmp_path: Path) -> None:
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch(server, tmp_path))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(server.script.requests) == 1
    assert_complete(results[0])


def test_cache_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot keep") as caught:
        fetch(server, tmp_path / "file")
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_altered_cache_is_refused(server: Server, tmp_path: Path) -> None:
    text = fetch(server, tmp_path)
    path = text / "wiki.valid.raw"
    path.write_bytes(b"X" + path.read_bytes()[1:])
    with pytest.raises(DataError, match="altered") as caught:
        archive_corpus(archive_at(server), tmp_path)
    assert str(text) in caught.value.hint
    for damaged in ("[]", "{", ""):
        (text / download.RECEIPT).write_text(damaged)
        with pytest.raises(DataError):
            archive_corpus(archive_at(server), tmp_path)


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert download.cache_folder() == tmp_path / "blockswarm"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert download.cache_folder() == tmp_path / "home" / ".cache" / "blockswarm"


@pytest.mark.parametrize("archive", [download.WIKITEXT_2, download.WIKITEXT_103])
def test_published_archives_are_pinned(archive: Archive) -> None:
    assert archive.url.startswith("https://")
    assert archive.file_name == f"{archive.name}-raw-v1.zip"
    assert len(archive.sha256) == 64
    assert [m.file_name for m in archive.members] == [*SPLITS]
