"""A host's folder: which one it is, and the small files in it that outlive the process.

Decides where a run's state lies by default, which of several folders a second host of the machine
takes, that a restarted host keeps its port, and what is remembered of how it was joined. The
training state is `state`'s, the key `protocol.identity`'s. Reads no network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from node.machine.atomic import StorageError, write_atomically
from protocol.errors import UsageError

RUN, JOINED, PORT, INVITATION, PEERS = (
    "run.toml",
    "joined.txt",
    "port",
    "invitation.txt",
    "peers.json",
)
HOSTS_PER_RUN = 64  # of one machine, each in a folder of its own
START_DELAY_S = 2  # from `seed` to the first round
MAX_SMALL_BYTES = 1 << 20
MAX_ADDRESSES = 32


def state_home() -> Path:
    """Where the folders of all runs are, unless --folder says otherwise."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "blockswarm"


def seed_home(run_name: str) -> Path:
    """The folder of the seed that starts a run of this name."""
    safe = "".join(c if c.isalnum() else "-" for c in run_name).lower()
    return state_home() / f"seed-{safe}"


def make(home: Path, option: str = "--folder") -> None:
    """`option`: where the person said it, or could."""
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder {home}: {error.strerror}", f"choose another with {option}"
        ) from error


def free_folder(base: Path) -> Path:
    """The first folder of this run whose identity no other process uses."""
    for number in range(1, HOSTS_PER_RUN + 1):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        make(folder)
        if not in_use(folder):
            return folder
    raise UsageError(f"{HOSTS_PER_RUN} hosts of this run are on this machine", "give --folder")


def take_identity(home: Path, identity: Path) -> bool:
    """Make `identity` that of a folder that has none; whether it had none."""
    own = home / "identity"
    try:
        os.link(identity, own)  # unlike a rename it never replaces one that is there
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if own.exists():
            return False
        shutil.move(identity, own)
    return True


def in_use(home: Path) -> bool:
    """Whether a host runs in this folder."""
    from protocol.identity import IdentityInUse, load_or_create

    if not (home / "identity").exists():
        return False
    try:
        load_or_create(home / "identity").close()
    except IdentityInUse:
        return True
    return False


def started(text: bytes, home: Path) -> bytes:
    """The run file with its start: the one of before if this seed was started before."""
    from swarm.runfile import parse, with_start

    kept = home / RUN
    if kept.exists():
        before = kept.read_bytes()
        start = parse(before).rounds.start_s
        if text == before or (not parse(text).started and with_start(text, start) == before):
            return before
        raise UsageError(
            f"{home} holds another run than this file", "give the new run a folder with --folder"
        )
    if not parse(text).started:
        text = with_start(text, int(time.time()) + START_DELAY_S)
    make(home)
    _put(kept, text)
    return text


# What is remembered.


def remember(home: Path, text: bytes, addresses: Iterable[str]) -> None:
    """The run, and through whom it was joined: for a restart when these are gone for ever.

    Raises `UsageError` if the folder is another run's.
    """
    before = run_in(home)
    if before is not None and before != text:
        from swarm.runfile import parse, run_id

        raise UsageError(
            f"{home} is the folder of another run, {_run_words(before)}; the address leads to "
            f"{parse(text).name} ({run_id(text).hex()[:16]})",
            f"leave --folder out, or choose a new one: --folder {home}-{run_id(text).hex()[:8]}",
        )
    with contextlib.suppress(StorageError):  # the state cannot be saved either, and that is said
        _put(home / RUN, text)
        _put(home / JOINED, "\n".join(addresses).encode())


def _run_words(text: bytes) -> str:
    """A run file in two words; whatever lies in a folder may be damaged."""
    from swarm.runfile import parse, run_id

    try:
        return f"{parse(text).name} ({run_id(text).hex()[:16]})"
    except UsageError:
        return "its run.toml cannot be read"


def keep_place(home: Path, port: int, invitations: Iterable[str]) -> None:
    """Our port, so that addresses which others know stay right; and our own addresses."""
    with contextlib.suppress(StorageError):
        _put(home / PORT, str(port).encode())
        _put(home / INVITATION, "\n".join(invitations).encode())


def run_in(home: Path) -> bytes | None:
    """The run file of a folder."""
    with contextlib.suppress(OSError):
        return (home / RUN).read_bytes()
    return None


def joined_through(home: Path) -> tuple[str, ...]:
    return tuple(_words(home / JOINED))


def invitations_in(home: Path) -> tuple[str, ...]:
    """Under which addresses the host of this folder was last reached."""
    return tuple(_words(home / INVITATION))


def known_addresses(home: Path) -> tuple[str, ...]:
    """Whole addresses of peers of the folder's run: its own hosts, then those met, latest first.

    A cache that anything may have damaged: what cannot be read is not there.
    """
    from node.network.addresses import AddressError, split_peer

    own = [home, *sorted(home.glob("worker-*"))]
    found = [address for folder in own for address in invitations_in(folder)]
    found += [address for folder in own for address in _peers_met(folder)]
    found += joined_through(home)
    usable = []
    for text in dict.fromkeys(found):
        with contextlib.suppress(AddressError):
            split_peer(text)
            usable.append(text)
    return tuple(usable[:MAX_ADDRESSES])


def _peers_met(home: Path) -> list[str]:
    """From the file of `node.network.discovery.PeerBook`, whose module costs seconds to import."""
    try:
        with open(home / PEERS, "rb") as file:
            book = msgspec.json.decode(file.read(MAX_SMALL_BYTES), type=dict[str, list[list[str]]])
    except (OSError, msgspec.DecodeError):
        return []
    return [address for line in reversed(book.get("met", [])) for address in line]


def latest_home() -> Path | None:
    """The folder of this machine's state home that a host was in last."""
    homes = [folder.parent for folder in state_home().glob(f"*/{RUN}")]

    def used_s(home: Path) -> float:
        times = [0.0]
        for name in (RUN, PEERS, PORT, "events.jsonl"):
            with contextlib.suppress(OSError):
                times.append((home / name).stat().st_mtime)
        return max(times)

    return max(homes, key=used_s, default=None)


def port_of_before(home: Path, hosts: tuple[str, ...]) -> int:
    """The port that this host had, if it is free; after a crash its p2pd holds it for a while."""
    from node.network.daemon import ORPHAN_S, DaemonError, PortInUse, free_port

    try:
        port = int((home / PORT).read_text())
    except (OSError, ValueError):
        return 0
    end_s = time.monotonic() + ORPHAN_S + 2.0
    while True:
        try:
            return free_port(hosts, port)[1]
        except PortInUse:
            if time.monotonic() > end_s:
                return 0
            time.sleep(0.2)
        except (DaemonError, OverflowError):
            return 0


def _words(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_SMALL_BYTES).decode(errors="replace").split()
    except OSError:
        return []


def _put(path: Path, data: bytes) -> None:
    def write(half: Path) -> None:
        half.write_bytes(data)

    write_atomically(path, write)
