"""What a host keeps on disk: its block's consensus with the log behind it, and the trainer's state.

Decides what a resumed host needs, and that it is there whole or not at all: files are written
under new names, then one small file that names them takes the place of the old one. What is read
back is checked like a stranger's: the log is replayed from its snapshot to its head.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from node.atomic import write_atomically
from node.consensus import Consensus
from node.fetch import Quanta
from node.replica import Replica
from node.trainer import Trainer
from protocol.errors import BlockswarmError
from protocol.packing import pack, unpack
from protocol.payloads import pack_log, unpack_log
from swarm.log import ConsensusLog, Entry, check_chain
from swarm.updates import from_shards, from_wire_entry, to_wire_entry

CURRENT = "state.json"
MAX_LOG_BYTES = 1 << 30


class StateError(BlockswarmError):
    """The saved state is damaged or of another run."""


@dataclass(frozen=True)
class HostState:
    """A saved state, read but not yet trusted."""

    block: int
    entries: tuple[Entry, ...]
    start: Quanta  # the weights of the oldest entry whose step is not kept
    start_entry: bytes
    updates: dict[bytes, list[bytes]]
    snapshot_every: int
    trainer_path: Path

    def restore(self, consensus: Consensus) -> ConsensusLog:
        """Replay the log into `consensus`; every step and digest is checked on the way."""
        check_chain(self.entries, self.entries[-1].digest)
        place = next((i for i, e in enumerate(self.entries) if e.digest == self.start_entry), None)
        if place is None or len(self.start) != len(consensus.weights):
            raise StateError("the saved state is of another model")
        consensus.restart(self.entries[place], self.start)
        log = ConsensusLog(self.entries[: place + 1], self.snapshot_every)
        consensus.prune(log)
        for entry in self.entries[place + 1 :]:
            consensus.follow(entry, self.updates.get(entry.digest, []))
            log = log.appended(entry)
            consensus.prune(log)
        return log


class StateFolder:
    """The folder of one host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def save(self, run_id: bytes, block: int, replica: Replica, trainer: Trainer) -> None:
        """Write the state as of now. The trainer's part first: it is what takes time."""
        log, consensus = replica.state.log, replica.consensus
        tag = f"{log.head.digest.hex()[:16]}-{replica.state.round}"
        trainer_path = self.folder / f"trainer-{tag}.safetensors"
        await trainer.save(trainer_path)
        # The trainer's weights may be some steps ahead of this log or behind it by a correction;
        # that difference is unsent, or comes back with the next rounds. It is never counted twice.
        log, consensus = replica.state.log, replica.consensus
        oldest = log.pinned()[0]
        snapshot = consensus.snapshots[oldest.digest]
        start = from_shards([bytes(s) for s in snapshot.shards], len(consensus.weights))
        updates = [[d, *u] for d, u in consensus.updates.items()]
        body = pack([pack_log([to_wire_entry(e) for e in log.entries[-256:]]), updates])
        log_path = self.folder / f"log-{tag}.msgpack"
        weights_path = self.folder / f"snapshot-{tag}.safetensors"
        write_atomically(log_path, lambda half: _write(half, body))
        write_atomically(weights_path, lambda half: save_file({"weights": start}, half))
        files = [trainer_path.name, log_path.name, weights_path.name]
        facts = {
            "run": run_id.hex(),
            "block": block,
            "start_entry": oldest.digest.hex(),
            "snapshot_every": log.snapshot_every,
            "files": files,
        }
        text = json.dumps(facts).encode()
        write_atomically(self.folder / CURRENT, lambda half: _write(half, text))
        self._remove_others(set(files))

    def load(self, run_id: bytes) -> HostState | None:
        """The last complete state of this run, or None if there is none to use."""
        try:
            facts: dict[str, Any] = json.loads((self.folder / CURRENT).read_bytes())
            if facts["run"] != run_id.hex():
                raise StateError(
                    f"{self.folder} holds the state of another run",
                    "give another folder with --folder, or remove this one",
                )
            trainer, log, weights = (self.folder / Path(n).name for n in facts["files"])
            body = unpack(log.read_bytes(), MAX_LOG_BYTES)
            assert isinstance(body, list)
            entries = tuple(from_wire_entry(e) for e in unpack_log(body[0]))
            updates = {row[0]: list(row[1:]) for row in body[1]}
            start = np.asarray(load_file(weights)["weights"], dtype=np.int32)
            return HostState(
                int(facts["block"]),
                entries,
                start,
                bytes.fromhex(facts["start_entry"]),
                updates,
                int(facts["snapshot_every"]),
                trainer,
            )
        except FileNotFoundError:
            return None
        except StateError:
            raise
        except Exception as error:  # a damaged file is as good as none: the swarm has the state
            raise StateError(
                f"the state in {self.folder} is damaged ({type(error).__name__})",
                f"remove {self.folder / CURRENT}; the host catches up from its peers",
            ) from error

    def _remove_others(self, kept: set[str]) -> None:
        for pattern in ("trainer-*", "log-*", "snapshot-*"):
            for path in self.folder.glob(pattern):
                if path.name not in kept:
                    path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
