"""A row under way, kept in a file: what was cut off goes on where it was.

Decides where the file is and whether it is still good: only for the same row and the same code on
the same kind of CPU, so that a row is one measurement. What is in it is the benchmark's business.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from node.machine.atomic import remove_file
from node.machine.tensor_file import DamagedFile, read_tensors, write_tensors


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
        said = {"key": self.key, "origin": self.origin, "facts": facts}
        write_tensors(self.path, tensors, said)

    def load(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """What was saved last; None if there is nothing, or nothing of this row and code. Code with
        changes that no commit has may be any."""
        if self.origin["commit"].endswith("-dirty"):
            return None
        try:
            tensors, said = read_tensors(self.path)
        except (FileNotFoundError, DamagedFile):
            return None
        if (said.get("key"), said.get("origin")) != (self.key, self.origin):
            return None
        return tensors, said["facts"]

    def remove(self) -> None:
        remove_file(self.path)
