"""A cache, beside the model, of the block versions that an assembler has pulled.

    model/consensus/block-<index>.safetensors   the weights as integers, and the log that led there

A file is used if it is intact, of this run, and its log ends in the weights' digest; otherwise it
is ignored. All files can be deleted at any time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
from safetensors.numpy import save_file

from node.log.fetch import Quanta
from node.machine.atomic import write_atomically
from protocol.digests import weights_digest
from protocol.errors import WireError
from protocol.limits import LOG_ENTRIES_PER_REPLY
from protocol.log import pack_log, unpack_log
from swarm.consensus.log import ConsensusLog, check_chain

FOLDER = "consensus"


class ConsensusStore:
    """The cached versions of one run in one model folder."""

    def __init__(self, model_folder: Path, run_id: bytes, snapshot_every: int) -> None:
        self.folder = model_folder / FOLDER
        self.run, self.snapshot_every = run_id.hex(), snapshot_every

    def path(self, block: int) -> Path:
        return self.folder / f"block-{block}.safetensors"

    def save(self, block: int, log: ConsensusLog, weights: Quanta) -> None:
        entries = log.entries[-LOG_ENTRIES_PER_REPLY:]
        packed = np.frombuffer(pack_log([e for e in entries]), dtype=np.uint8)
        arrays: dict[str, npt.NDArray[Any]] = {
            "weights": np.ascontiguousarray(weights, dtype=np.int32),
            "log": packed,
        }
        about = {"run": self.run, "block": str(block)}
        write_atomically(self.path(block), lambda half: save_file(arrays, half, about))

    def load(self, block: int, size: int) -> tuple[ConsensusLog, Quanta] | None:
        try:
            with safetensors.safe_open(self.path(block), framework="np") as file:
                about = file.metadata() or {}
                if about.get("run") != self.run or about.get("block") != str(block):
                    return None
                if file.get_slice("weights").get_shape() != [size]:
                    return None
                weights, packed = file.get_tensor("weights"), file.get_tensor("log")
            entries = tuple(e for e in unpack_log(packed.tobytes()))
            check_chain(entries, entries[-1].digest if entries else b"")
        except (OSError, safetensors.SafetensorError, WireError):
            return None
        if weights.dtype != np.int32 or weights_digest(weights) != entries[-1].weights:
            return None
        return ConsensusLog(entries, self.snapshot_every), weights
