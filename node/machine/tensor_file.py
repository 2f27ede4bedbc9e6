"""Tensors with their metadata ("facts") in one file, written atomically.

The format is safetensors with the facts as JSON in its header, so reading never runs foreign code.
Callers check whether the facts make sense.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from node.machine.atomic import write_atomically

_FACTS = "blockswarm"


class DamagedFile(Exception):
    """The file cannot be read or is not of our format; the caller words the message to people."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write the file. Raises `StorageError` on failure; an old file is then kept."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = {_FACTS: json.dumps(facts)}
    write_atomically(path, lambda half: save_file(held, half, about))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and their facts. Raises `DamagedFile`, `FileNotFoundError`."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})[_FACTS])
            names = file.keys()  # `file` is not iterable
            tensors = {name: file.get_tensor(name) for name in names}
    except FileNotFoundError:
        raise
    except (OSError, safetensors.SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise DamagedFile(str(error)) from error
    if not isinstance(facts, dict):
        raise DamagedFile("its description is no map")
    return tensors, facts
