"""A peer's identity: an Ed25519 key in a file that p2pd accepts, and the peer id made from it.

The file must be private to its owner and is locked, so that one process uses it at a time.
Known limit: two machines with the same file are not noticed here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import IdentityError
from protocol.limits import PEER_ID_BYTES
from protocol.packing import Malformed

# libp2p's PrivateKey protobuf {1: type = Ed25519, 2: 64 bytes}: always this prefix, then the
# 32-byte seed and the 32-byte public key.
_FILE_PREFIX = bytes.fromhex("08011240")
_FILE_BYTES = len(_FILE_PREFIX) + 64
# A peer id is the identity multihash (code 0, length 36) of the PublicKey protobuf.
_PEER_ID_PREFIX = bytes.fromhex("002408011220")

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_VALUE = {character: value for value, character in enumerate(_BASE58)}
_PEER_TEXT_MAX = 64  # 52 for ours; base58 is quadratic, so the length is checked first


class IdentityReadable(IdentityError):
    """Other users of this machine can read the private key."""


class IdentityDamaged(IdentityError):
    """The file is not an Ed25519 key as we write it."""


class IdentityInUse(IdentityError):
    """Another process on this machine runs with this identity."""


def peer_id_of(public_key: bytes) -> bytes:
    if len(public_key) != 32:
        raise Malformed("an Ed25519 public key has 32 bytes")
    return _PEER_ID_PREFIX + public_key


def public_key_of(peer_id: bytes) -> bytes:
    """The public key inside a peer id. Raises `Malformed` for RSA and other ids."""
    if len(peer_id) != PEER_ID_BYTES or not peer_id.startswith(_PEER_ID_PREFIX):
        raise Malformed("not an Ed25519 peer id")
    return peer_id[len(_PEER_ID_PREFIX) :]


@lru_cache(4096)  # the same few peers, many times a round
def peer_text(peer_id: bytes) -> str:
    """The base58 form that people and multiaddresses use (`12D3Koo...`)."""
    zeros = len(peer_id) - len(peer_id.lstrip(b"\0"))
    value = int.from_bytes(peer_id, "big")
    digits = ""
    while value:
        value, remainder = divmod(value, 58)
        digits = _BASE58[remainder] + digits
    return "1" * zeros + digits


@lru_cache(4096)
def known_text(peer_id: bytes) -> str:
    """The text of a peer id that another peer sent. Raises `Malformed` unless it is an Ed25519 id:
    with a second form of the same id one peer would count as two."""
    public_key_of(peer_id)
    return peer_text(peer_id)


@lru_cache(4096)
def peer_from_text(text: str) -> bytes:
    """The peer id of a base58 text. Raises `Malformed`."""
    if len(text) > _PEER_TEXT_MAX:
        raise Malformed("too long for a peer id")
    value = 0
    for character in text:
        if character not in _BASE58_VALUE:
            raise Malformed("not base58")
        value = value * 58 + _BASE58_VALUE[character]
    zeros = len(text) - len(text.lstrip("1"))
    peer_id = b"\0" * zeros + value.to_bytes((value.bit_length() + 7) // 8, "big")
    public_key_of(peer_id)
    return peer_id


@lru_cache(512)  # the same record or vote arrives from many peers: its signature is checked once
def verify(peer_id: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the owner of `peer_id` signed `message`. Raises `Malformed` for other ids."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(peer_id)).verify(signature, message)
    except InvalidSignature:
        return False
    return True


class Identity:
    """A private key and, if it came from a file, the lock on that file.

    The lock ends with the process or with `close`. A forked child would inherit it, so children
    must be spawned.
    """

    def __init__(self, seed: bytes, path: Path | None = None, lock_fd: int | None = None) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self._lock_fd = lock_fd
        self.path = path
        self.peer_id = peer_id_of(self._key.public_key().public_bytes_raw())

    @property
    def text(self) -> str:
        return peer_text(self.peer_id)

    def __repr__(self) -> str:  # the seed must not reach a log
        return f"Identity({self.text})"

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def to_bytes(self) -> bytes:
        """The content of the identity file."""
        return _FILE_PREFIX + self._seed + public_key_of(self.peer_id)

    @classmethod
    def from_bytes(cls, data: bytes, path: Path | None = None) -> Identity:
        where = f" in {path}" if path else ""
        hint = "restore it from a backup, or move it away to start with a new identity"
        if len(data) != _FILE_BYTES or not data.startswith(_FILE_PREFIX):
            raise IdentityDamaged(f"no Ed25519 identity of {_FILE_BYTES} bytes{where}", hint)
        seed, public_key = data[4:36], data[36:]
        identity = cls(seed, path)
        if public_key_of(identity.peer_id) != public_key:
            raise IdentityDamaged(f"private and public key do not match{where}", hint)
        return identity

    def close(self) -> None:
        """Let another process use the file."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def new_identity() -> Identity:
    """A new identity that is in no file."""
    return Identity(Ed25519PrivateKey.generate().private_bytes_raw())


def load_or_create(path: Path | str) -> Identity:
    """The identity in `path`, created (mode 0600) if there is none, and locked for this process."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_fd = _lock(path)
    except OSError as error:
        raise IdentityError(f"cannot use {path}: {error.strerror}") from error
    try:
        if not path.exists():
            _write_new(path, new_identity().to_bytes())
        identity = Identity.from_bytes(_read(path), path)
    except OSError as error:
        os.close(lock_fd)
        raise IdentityError(f"cannot use {path}: {error.strerror}") from error
    except BaseException:
        os.close(lock_fd)
        raise
    identity._lock_fd = lock_fd
    return identity


def _lock(path: Path) -> int:
    # flock, not lockf: it also keeps two nodes of one process apart, and the kernel drops it
    # with the process. The lock is a sibling, so that the key file itself is never rewritten.
    lock_path = path.with_name(path.name + ".lock")
    lock_fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        raise IdentityInUse(
            f"another process uses the identity {path}",
            "stop it, or give this one a folder of its own with --folder",
        ) from None
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def _read(path: Path) -> bytes:
    # O_NONBLOCK: a FIFO in the file's place must be an error and not a hang.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise IdentityDamaged(f"{path} is not a regular file", "move it away")
        if status.st_mode & 0o077:
            raise IdentityReadable(
                f"{path} holds a private key and others can read it", f"chmod 600 {path}"
            )
        return file.read(_FILE_BYTES + 1)


def _write_new(path: Path, data: bytes) -> None:
    """Write a temporary file beside `path`, then link it: a crash leaves a whole file or none."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left by an earlier crash; we hold the lock
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
    try:
        os.link(temporary, path)  # unlike a rename it never replaces a key that is there
        temporary.unlink()
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        os.rename(temporary, path)  # a file system without hard links
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)
