"""What a host keeps on disk: its block's consensus with the log behind it, and the trainer's state.

Decides what a resumed host needs, and that it is there whole or not at all: files are written under
new names, then one small file that names them takes the place of the old one. All of them are of
one moment (`node.replica.running_weights.Moment`), so that nothing is counted twice or undone after
a resume: the updates in flight are among them. What is read back is checked like a stranger's: the
log is replayed from its snapshot to its head.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from node.log.consensus import Consensus
from node.log.fetch import Quanta
from node.machine.atomic import HALF, write_atomically
from node.replica.own_updates import OwnUpdate
from node.replica.running_weights import Moment
from protocol.errors import BlockswarmError
from protocol.identity import peer_from_text
from protocol.log import Entry, pack_log, unpack_log
from protocol.packing import pack, unpack
from protocol.updates import update_digest
from protocol.votes import UpdateRef
from swarm.consensus.log import ConsensusLog, check_chain
from swarm.consensus.updates import UpdateCodec

CURRENT = "state.json"
MAX_LOG_BYTES = 1 << 30
MAX_ROWS = 1 << 16  # entries, updates of an entry, updates under way: our own file, not a peer's
MAX_FACTS_BYTES = 1 << 20
ENTRIES_SAVED = 600  # two snapshots are among them: they are at most 128 rounds apart


class StateError(BlockswarmError):
    """The saved state is of another run."""


class DamagedState(StateError):
    """The saved state cannot be read: as good as none, the swarm has the consensus."""


@dataclass(frozen=True)
class HostState:
    """A saved state, read but not yet trusted."""

    block: int
    entries: tuple[Entry, ...]
    start: Quanta  # the weights of a pinned entry
    start_entry: bytes
    updates: dict[bytes, list[bytes]]
    in_flight: list[tuple[int, bytes]]  # round and encoded update, ours
    trainer_path: Path

    def restore(self, codec: UpdateCodec, snapshot_every: int, me: str) -> Moment:
        """Replay the log; every step and digest is checked on the way. Raises `WireError`s."""
        check_chain(self.entries, self.entries[-1].digest)
        start = next((e for e in self.entries if e.digest == self.start_entry), None)
        if start is None or len(self.start) != codec.size:
            raise StateError("the saved state is of another model")
        consensus = Consensus(self.start, codec, self.block)
        consensus.restart(start, self.start)
        log = ConsensusLog(self.entries, snapshot_every)
        consensus.go_on(log, start, self.updates)
        own = {}
        for number, payload in self.in_flight:
            update = codec.decode(payload, self.block, number, peer_from_text(me))
            own[UpdateRef(update_digest(payload), me)] = OwnUpdate(number, update, payload)
        return Moment(log, consensus, own)


class StateFolder:
    """The folder of one host. One writer: its identity is locked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()  # a save that its task gave up on may still be at it in its thread
        self._writing: set[str] = set()

    def trainer_path(self) -> Path:
        """A new name for the trainer's part, which is written first."""
        path = self.folder / f"trainer-{time.time_ns():x}.safetensors"
        self._writing.add(path.name)
        return path

    def save(self, run_id: bytes, block: int, moment: Moment, trainer_path: Path) -> None:
        """Write the state of a moment; `trainer_path` was written at that very moment."""
        with self._lock:
            try:
                self._write_all(run_id, block, moment, trainer_path)
            except BaseException:
                self.give_up(trainer_path)
                raise

    def give_up(self, trainer_path: Path) -> None:
        """It was not to be: on a full disk half of a state must not stay."""
        self._writing.discard(trainer_path.name)
        self.remove_unnamed()

    def _write_all(self, run_id: bytes, block: int, moment: Moment, trainer_path: Path) -> None:
        log, consensus = moment.log, moment.consensus
        found = consensus.oldest_start(log)
        if found is None:
            raise StateError("no snapshot to save yet")
        start, snapshot = found
        weights_path = self.folder / f"snapshot-{start.digest.hex()}.safetensors"
        if not weights_path.exists():  # named by its content: the same one serves for many rounds
            weights = consensus.snapshot_weights(log, snapshot)
            if weights is None:
                raise StateError("no snapshot to save yet")
            write_atomically(weights_path, lambda half: save_file({"weights": weights}, half))
        entries = [entry for entry in log.entries[-ENTRIES_SAVED:]]
        updates = [[digest, *held] for digest, held in consensus.updates.items()]
        in_flight = [[made.round, made.payload] for made in moment.in_flight.values()]
        body = pack([[pack_log([entry]) for entry in entries], updates, in_flight])
        log_path = self.folder / f"log-{time.time_ns():x}.msgpack"
        write_atomically(log_path, lambda half: _write(half, body))
        facts: dict[str, Any] = {
            "run": run_id.hex(),
            "block": block,
            "start_entry": start.digest.hex(),
            "files": [trainer_path.name, log_path.name, weights_path.name],
        }
        text = json.dumps(facts).encode()
        write_atomically(self.folder / CURRENT, lambda half: _write(half, text))
        self._writing.discard(trainer_path.name)
        self._remove_others(facts["files"])

    def load(self, run_id: bytes) -> HostState | None:
        """The last complete state of this run, or None. Raises `StateError`, `DamagedState`."""
        try:
            facts = self._facts()
            if facts["run"] != run_id.hex():
                raise StateError(
                    f"{self.folder} holds the state of another run",
                    "give another folder with --folder, or remove this one",
                )
            trainer, log, weights = (self.folder / Path(n).name for n in facts["files"])
            body: Any = unpack(log.read_bytes(), MAX_LOG_BYTES, MAX_ROWS)
            return HostState(
                int(facts["block"]),
                tuple(e for one in body[0] for e in unpack_log(one)),
                np.asarray(load_file(weights)["weights"], dtype=np.int32),
                bytes.fromhex(facts["start_entry"]),
                {row[0]: list(row[1:]) for row in body[1]},
                [(int(number), bytes(payload)) for number, payload in body[2]],
                trainer,
            )
        except FileNotFoundError as error:
            if error.filename == str(self.folder / CURRENT):
                return None
            raise self._damaged(error) from error
        except StateError:
            raise
        except Exception as error:  # whatever a broken disk left there
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DamagedState:
        return DamagedState(
            f"the state in {self.folder} is damaged ({type(error).__name__})",
            f"remove {self.folder / CURRENT}; the host catches up from its peers",
        )

    def _facts(self) -> dict[str, Any]:
        with open(self.folder / CURRENT, "rb") as file:
            facts: dict[str, Any] = json.loads(file.read(MAX_FACTS_BYTES))
        return facts

    def remove_unnamed(self) -> None:
        """Remove what no complete state names: left by a kill or by a full disk."""
        kept: set[str] = set()
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = {Path(name).name for name in self._facts()["files"]}
        self._remove_others(kept)

    def _remove_others(self, kept: Iterable[str]) -> None:
        kept = {*kept, *self._writing}
        for name in ("trainer-", "log-", "snapshot-"):
            for path in (*self.folder.glob(f"{name}*"), *self.folder.glob(f".{name}*{HALF}")):
                of = path.name.removeprefix(".")
                if not any(of == known or of.startswith(f"{known}.") for known in kept):
                    with suppress(OSError):
                        path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
