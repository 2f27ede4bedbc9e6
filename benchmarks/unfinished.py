"""A row under way, kept in a file: what was cut off goes on where it was.

Decides where the file is and whether it is still good: only for the same row and the same code on
the same kind of CPU, so that a row is one measurement. What is in it is the benchmark's business.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from node.atomic import remove_file, write_atomically

_FACTS = "row"


@dataclass(frozen=True)
class Unfinished:
    """The file of one row. `origin` says of which code and machine it must be."""

    folder: Path
    key: str
    origin: dict[str, str]

    @property
    def path(self) -> Path:
        return self.folder / f"{hashlib.sha256(self.key.encode()).hexdigest()[:16]}.safetensors"

    def save(self, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        said = {_FACTS: json.dumps({"key": self.key, "origin": self.origin, "facts": facts})}
        write_atomically(self.path, lambda half: save_file(whole, half, said))

    def load(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """What was saved last; None if there is nothing, or nothing of this row and code."""
        try:
            with safetensors.safe_open(self.path, framework="pt") as held:
                said = json.loads(held.metadata()[_FACTS])
                if (said["key"], said["origin"]) != (self.key, self.origin):
                    return None
                names = held.keys()  # it is no dictionary
                return {name: held.get_tensor(name) for name in names}, said["facts"]
        except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError):
            return None

    def remove(self) -> None:
        remove_file(self.path)
