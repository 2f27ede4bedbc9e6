"""Download the archive of a named corpus once, verify it, and unpack it into the user's cache.

Partial downloads are resumed. Refused are other lengths and hashes, and archives whose members are
too large or not the wanted ones. The cache, by default `$XDG_CACHE_HOME/blockswarm` or
`~/.cache/blockswarm`:

    wikitext-2/lock                          held while one process downloads; others wait
    wikitext-2/wikitext-2-raw-v1.zip.part    an incomplete download
    wikitext-2/wikitext-2-raw-v1.zip         complete and verified, or put there by hand
    wikitext-2/text/                         the unpacked splits and receipt.json; put in place by
                                             a rename

Both archives are pinned by the sha256 of the original release, so any mirror will do, and parts
that were joined from different versions are detected. WikiText is licensed CC BY-SA; it is never
part of this repository.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import DataError

Progress = Callable[[str, int, int], None]
"""Called with a description, bytes done, and bytes in total (0: not known)."""

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 30.0
RETRY_PAUSES_S = (1.0, 3.0, 10.0)
MAX_ATTEMPTS = 50
RECEIPT = "receipt.json"


@dataclass(frozen=True)
class ArchiveMember:
    """A wanted file of an archive. It is refused if it is larger than `max_bytes`."""

    file_name: str
    max_bytes: int


@dataclass(frozen=True)
class Archive:
    """A zip file to download, with its exact length and hash."""

    name: str
    url: str
    size_bytes: int
    sha256: str
    members: tuple[ArchiveMember, ...]

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


WIKITEXT_2 = Archive(
    name="wikitext-2",
    url="https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
    size_bytes=4_721_645,
    sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    members=(
        ArchiveMember("wiki.train.raw", 10_940_747),
        ArchiveMember("wiki.valid.raw", 1_146_846),
        ArchiveMember("wiki.test.raw", 1_290_590),
    ),
)

# The original zip rather than the parquet files of the same text: its hash is published in many
# places, it is smaller, and it needs no parquet reader. The revision in the address is pinned.
WIKITEXT_103 = Archive(
    name="wikitext-103",
    url="https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/"
    "3555105b17ae31cc619a136fac72dbe2865c3738/wikitext-103-raw-v1.zip",
    size_bytes=191_984_949,
    sha256="91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
    members=(
        ArchiveMember("wiki.train.raw", 600_000_000),
        ArchiveMember("wiki.valid.raw", 2_000_000),
        ArchiveMember("wiki.test.raw", 2_000_000),
    ),
)


class _CutOff(Exception):
    """The transfer broke off for a temporary reason; the partial file is kept."""


class _Refused(Exception):
    """The server offers something else than the archive; retrying will not help."""


def silent(what: str, done_bytes: int, total_bytes: int) -> None:
    """A `Progress` that does nothing."""


def cache_folder() -> Path:
    """The folder for downloads. By the XDG rules a relative XDG_CACHE_HOME is ignored."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "blockswarm"


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ensure_unpacked(
    archive: Archive,
    cache: Path | None = None,
    progress: Progress = silent,
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """The folder with the archive's members, which are downloaded and unpacked if need be.

    `text/` is put in place by one rename after everything in it was verified, so if it exists it is
    complete. `pause` is called between attempts after a broken connection.
    """
    home = (cache or cache_folder()) / archive.name
    text, packed = home / "text", home / archive.file_name
    if text.is_dir():
        return text
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / "lock", lambda: progress("waiting for another process", 0, 0)):
            if text.is_dir():
                return text
            by_hand = packed.exists()
            if not by_hand:
                download(archive, packed, progress, pause)
            elif sha256_file(packed) != archive.sha256:
                raise DataError(
                    f"{packed} is not the original {archive.file_name} (its sha256 differs)",
                    f"remove it, then try again or put the file with sha256 {archive.sha256} there",
                )
            progress(f"unpacking {archive.file_name}", 0, 0)
            unpack_archive(archive, packed, text)
            if not by_hand:
                packed.unlink()
    except OSError as error:
        raise DataError(
            f"cannot keep {archive.name} in {home}: {error.strerror or error}",
            "free some space, or set XDG_CACHE_HOME to a folder that you can write to",
        ) from error
    return text


def download(
    archive: Archive, target: Path, progress: Progress, pause: Callable[[float], None]
) -> None:
    """Download `archive`, resuming a partial file, verify it, then rename it to `target`."""
    part = _part(target)
    try:
        in_one_piece = _complete(archive, part, progress, pause)
        if not in_one_piece and sha256_file(part) != archive.sha256:
            # Parts of two versions may have been joined: download once more from the start.
            part.unlink()
            _complete(archive, part, progress, pause)
        if sha256_file(part) != archive.sha256:
            part.unlink()
            raise _Refused("its sha256 is not that of the original release")
    except _Refused as refused:
        raise DataError(
            f"cannot download {archive.name}: {refused}",
            "give your own text with --data PATH, or --data python, which needs no download; or "
            f"put {archive.url} (sha256 {archive.sha256}) by hand at {target}",
        ) from refused.__cause__
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(target)


def _complete(
    archive: Archive, part: Path, progress: Progress, pause: Callable[[float], None]
) -> bool:
    """Request until `part` is as long as the archive. True if one request brought all of it."""
    idle_attempts, received = 0, False
    for _ in range(MAX_ATTEMPTS):
        size_before = _size(part)
        try:
            return _transfer(archive, part, progress)
        except _CutOff as cut:
            gained = _size(part) > size_before
            dropped = size_before > 0 and _size(part) == 0  # the server could not resume it
            received = received or gained or dropped
            idle_attempts = 0 if gained else idle_attempts + 1
            # If nothing ever arrived there is most likely no network: fail at once.
            if not received or idle_attempts > len(RETRY_PAUSES_S):
                raise _Refused(str(cut)) from cut.__cause__
            pause(RETRY_PAUSES_S[max(0, idle_attempts - 1)])
    raise _Refused(f"gave up after {MAX_ATTEMPTS} attempts")


def _transfer(archive: Archive, part: Path, progress: Progress) -> bool:
    """Make one request. True if it brought the whole file, False if it completed a partial one."""
    size_bytes = archive.size_bytes
    have = _size(part)
    if have == size_bytes:
        return False  # killed between the last byte and the rename
    if have > size_bytes:
        part.unlink()
        have = 0
    try:
        with _request(archive.url, have) as response:
            resumed = response.status == http.client.PARTIAL_CONTENT
            done = have if resumed else 0
            _check_length(archive, part, response, done)
            with part.open("ab" if resumed else "wb") as file:
                while chunk := _receive(response):
                    done += len(chunk)
                    if done > size_bytes:
                        break
                    file.write(chunk)
                    progress(f"downloading {archive.file_name}", done, size_bytes)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                part.unlink(missing_ok=True)
            elif error.code not in (408, 429) and error.code < 500:
                raise _Refused(f"HTTP {error.code} {error.reason}") from error
            raise _CutOff(f"HTTP {error.code} {error.reason}") from error
    if done > size_bytes:
        part.unlink()
        raise _Refused(f"the server sent more than {size_bytes} bytes")
    if done < size_bytes:
        raise _CutOff(f"the connection ended after {done} of {size_bytes} bytes")
    return not resumed


def _request(url: str, have: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": "blockswarm", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    if not url.startswith(("http://", "https://")):
        raise DataError(f"{url} is not an http address")
    request = urllib.request.Request(url, headers=headers)  # noqa: S310
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise _CutOff(f"no connection ({getattr(error, 'reason', error)})") from error
    assert isinstance(response, http.client.HTTPResponse)
    return response


def _receive(response: http.client.HTTPResponse) -> bytes:
    """Read one chunk. Separate from writing, to tell a broken connection from a full disk."""
    try:
        return response.read1(CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _CutOff(f"the connection broke ({error!r})") from error


def _check_length(
    archive: Archive, part: Path, response: http.client.HTTPResponse, start: int
) -> None:
    """Refuse a file of another length before it is written, e.g. a captive portal's page."""
    if response.status == http.client.PARTIAL_CONTENT:
        found = re.fullmatch(
            r"bytes (\d{1,15})-\d{1,15}/(\d{1,15}|\*)", response.headers.get("Content-Range", "")
        )
        if found is None or int(found[1]) != start:
            part.unlink(missing_ok=True)
            raise _CutOff("the server answered with another range than the one asked for")
        offered = found[2]
    elif response.status == http.client.OK:
        offered = response.headers.get("Content-Length", "*")
    else:
        raise _Refused(f"HTTP {response.status}")
    if offered not in ("*", str(archive.size_bytes)):
        part.unlink(missing_ok=True)
        raise _Refused(f"the server offers {offered[:20]} bytes instead of {archive.size_bytes}")


def unpack_archive(archive: Archive, packed: Path, folder: Path) -> None:
    """Unpack the wanted members of a verified archive, then rename the result to `folder`.

    Paths inside the archive are never used: a member is found by the last part of its name and
    written under our own name for it. The receipt stores their hashes, so that later starts can
    check that they are unaltered.
    """
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        with zipfile.ZipFile(packed) as source:
            receipt = {m.file_name: _unpack_member(source, m, partial) for m in archive.members}
    except DataError:
        shutil.rmtree(partial)
        raise
    (partial / RECEIPT).write_text(json.dumps(receipt, indent=1), encoding="utf-8")
    partial.replace(folder)


def _unpack_member(source: zipfile.ZipFile, member: ArchiveMember, folder: Path) -> str:
    found = [i for i in source.infolist() if i.filename.rsplit("/", 1)[-1] == member.file_name]
    if len(found) != 1:
        raise DataError(f"the archive holds {member.file_name} {len(found)} times instead of once")
    if found[0].file_size > member.max_bytes:  # zipfile reads no more than the directory says
        raise DataError(f"{member.file_name} unpacks to more than {member.max_bytes} bytes")
    target = folder / member.file_name
    with source.open(found[0]) as content, target.open("wb") as file:
        shutil.copyfileobj(content, file, CHUNK_BYTES)
        file.flush()
        os.fsync(file.fileno())
    return sha256_file(target)


def read_receipt(folder: Path) -> dict[str, str]:
    """File name -> sha256, as stored when the archive was unpacked into `folder`."""
    try:
        receipt = json.loads((folder / RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} has no readable receipt", f"remove {folder}") from error
    if not isinstance(receipt, dict):
        raise DataError(f"{folder / RECEIPT} is damaged", f"remove {folder}")
    return {str(name): str(digest) for name, digest in receipt.items()}


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file, which the kernel releases if the process dies."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
