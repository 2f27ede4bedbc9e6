"""The model folder: `model.safetensors` and `manifest.json`. It loads offline, with no pickle.

The manifest describes each block (version, digest, CE) and how they compose. Weights that do not
match it are refused, with an error that names the block or tensor.

    model/
      model.safetensors   every block's tensors, named block.<index>.<parameter>
      manifest.json       format, run, blocks (index -> version, digest), composition, data, figures
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from node.machine.atomic import write_together
from protocol.errors import ModelError, UsageError
from protocol.version import PACKAGE_VERSION
from swarm.cost import block_parameters
from swarm.learning.composition import ComposedModel
from swarm.learning.model import Block, block_of
from swarm.run import Composition, Run

FORMAT = "blockswarm-model"
FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 1 << 20
SMALL = 1 << 20  # numbers allocated whatever the file's size, to report precisely what is wrong
MANIFEST, WEIGHTS = "manifest.json", "model.safetensors"


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest of a block's weights: of the tensors' names, dtypes, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_model(
    folder: Path, model: ComposedModel, versions: list[int | None], facts: Mapping[str, Any]
) -> None:
    """Write the folder. The manifest is written last: without it a folder is not a model."""
    tensors: dict[str, Tensor] = {}
    blocks: list[dict[str, Any]] = []
    for index, block in enumerate(model.blocks):
        if block is None:
            continue
        state = {name: value.contiguous().cpu() for name, value in block.state_dict().items()}
        tensors.update({f"block.{index}.{name}": value for name, value in state.items()})
        blocks.append({"block": index, "version": versions[index], "digest": tensors_digest(state)})
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "blockswarm": PACKAGE_VERSION,
        "run": model.run.to_dict(),
        "blocks": blocks,
        "composition": {
            "kind": model.composition,
            "weights": list(model.weights),
            "temperature": model.temperature,
        },
        **facts,
    }
    text = json.dumps(manifest, indent=1, allow_nan=False) + "\n"
    write_together(
        {
            folder / WEIGHTS: lambda half: _write_weights(half, tensors),
            folder / MANIFEST: lambda half: _write_text(half, text),
        }
    )


def load_model(
    folder: Path, device: torch.device, leave_out: frozenset[int] = frozenset()
) -> tuple[ComposedModel, dict[str, Any]]:
    """Read the blocks, check them against the manifest, and compose. Raises `ModelError`."""
    manifest = read_manifest(folder)
    run, digests = _described_blocks(folder, manifest)
    for index in sorted(leave_out):
        if not 0 <= index < run.model.blocks:
            raise UsageError(
                f"{folder} has no block {index} to leave out",
                f"its blocks are 0 to {run.model.blocks - 1}",
            )
    _refuse_lost_entries(folder, manifest, run, set(digests) | leave_out)
    if not set(digests) - leave_out:
        raise UsageError(
            f"every block of {folder} is left out", "let at least one in: fewer of --without"
        )
    tensors = _read_tensors(folder)
    blocks: list[Block | None] = []
    for index in range(run.model.blocks):
        if index in leave_out or index not in digests:
            blocks.append(None)
            continue
        blocks.append(_load_block(folder, run, index, tensors, digests[index]).to(device))
    return _composed(folder, run, blocks, manifest.get("composition")), manifest


def _described_blocks(folder: Path, manifest: Mapping[str, Any]) -> tuple[Run, dict[int, str]]:
    try:
        run = Run.from_dict(manifest["run"])
        digests = {int(entry["block"]): str(entry["digest"]) for entry in manifest["blocks"]}
    except KeyError as error:
        raise ModelError(f"{folder / MANIFEST} lacks {error}", _HINT) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{folder / MANIFEST} has a bad list of blocks", _HINT) from error
    except UsageError as error:
        raise ModelError(f"{folder / MANIFEST}: {error.message}", _HINT) from error
    return run, digests


def _refuse_lost_entries(
    folder: Path, manifest: Mapping[str, Any], run: Run, accounted: set[int]
) -> None:
    """Refuse blocks without an entry that are not listed as left out at assembly."""
    assembly = manifest.get("assembly")
    missing = assembly.get("missing") if isinstance(assembly, dict) else None
    known = missing if isinstance(missing, list) else []
    for index in range(run.model.blocks):
        if index not in accounted and index not in known:
            raise ModelError(
                f"block {index} is missing from {folder / MANIFEST}",
                f"{_HINT}; or leave it out with --without {index}",
            )


def _composed(
    folder: Path, run: Run, blocks: list[Block | None], composition: Any
) -> ComposedModel:
    try:
        kind = composition["kind"]
        weights = tuple(float(weight) for weight in composition["weights"])
        temperature = float(composition["temperature"])
        finite = all(map(math.isfinite, (*weights, temperature)))
        if kind not in get_args(Composition) or not finite or temperature <= 0.0:
            raise ValueError
        return ComposedModel(run, blocks, weights, temperature, kind)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{folder / MANIFEST} has a bad composition", _HINT) from error
    except UsageError as error:
        raise ModelError(f"{folder}: {error.message}", error.hint or _HINT) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ModelError(f"{path} is larger than a manifest can be", _HINT)
        manifest = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.exists():
            raise ModelError(
                f"no such folder: {folder}",
                f"blockswarm train -o {shlex.quote(str(folder))} makes a model there",
            ) from error
        if not folder.is_dir():
            raise ModelError(
                f"{folder} is not a model folder, it is a file",
                "give the folder that `blockswarm train -o` or `assemble -o` wrote",
            ) from error
        raise ModelError(
            f"{folder} is not a model folder: it has no {MANIFEST}",
            f"blockswarm train -o {shlex.quote(str(folder))} makes one",
        ) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", _HINT) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}", _HINT) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ModelError(f"{path} is not a manifest of blockswarm", _HINT)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ModelError(
            f"{path} has format version {manifest.get('format_version')}, this program reads "
            f"{FORMAT_VERSION}",
            "install the version of blockswarm that wrote it: "
            f"{manifest.get('blockswarm', 'unknown')}",
        )
    return manifest


def has_model(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def data_sha256(manifest: Mapping[str, Any]) -> str | None:
    """The sha256 of the corpus that the model was trained on or judged by, if it is stated."""
    data = manifest.get("data")
    found = data.get("sha256") if isinstance(data, dict) else None
    return found if isinstance(found, str) else None


def data_spec(manifest: Mapping[str, Any]) -> str:
    """The `--data` of the model's training."""
    data = manifest.get("data")
    spec = data.get("spec") if isinstance(data, dict) else None
    return spec if isinstance(spec, str) else "python"


_HINT = "fetch or train the model again; nothing was loaded"


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has a manifest but no {WEIGHTS}", _HINT) from error
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}", _HINT) from error
    return tensors


def _load_block(
    folder: Path, run: Run, index: int, tensors: Mapping[str, Tensor], digest: str
) -> Block:
    prefix = f"block.{index}."
    state = {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
    if not state:
        raise ModelError(
            f"block {index} is missing from {folder / WEIGHTS}",
            f"{_HINT}; or leave it out with --without {index}",
        )
    block = _block_for(run, index, state)
    _check_tensors(index, state, block.state_dict())
    if tensors_digest(state) != digest:
        raise ModelError(
            f"block {index} was altered: its digest is not the manifest's",
            f"{_HINT}; or leave it out with --without {index}",
        )
    block.load_state_dict(state)
    return block


def _block_for(run: Run, index: int, state: Mapping[str, Tensor]) -> Block:
    """A new block as the manifest describes it. Since that may ask for any size, it is allocated
    only if the file is large enough to hold it."""
    wanted, there = block_parameters(run)[index], sum(value.numel() for value in state.values())
    if wanted > max(SMALL, 4 * there):
        raise ModelError(
            f"block {index} has {there} numbers, the manifest's model needs {wanted}", _HINT
        )
    return block_of(run, index)


def _check_tensors(index: int, state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Check names, shapes, dtypes and values one by one, so that the error names the tensor."""
    for name, like in wanted.items():
        if name not in state:
            raise ModelError(f"block {index} lacks the tensor {name}", _HINT)
        if state[name].shape != like.shape:
            raise ModelError(
                f"block {index}: {name} has the shape {tuple(state[name].shape)}, the manifest's "
                f"model needs {tuple(like.shape)}",
                _HINT,
            )
        if state[name].dtype != like.dtype:
            raise ModelError(f"block {index}: {name} is {state[name].dtype}", _HINT)
        if not bool(state[name].isfinite().all()):
            raise ModelError(f"block {index}: {name} has values that are not finite", _HINT)
    for name in state:
        if name not in wanted:
            raise ModelError(f"block {index} has an unknown tensor {name}", _HINT)


def _write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write with the usual mode of new files: safetensors makes one that others cannot read."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file(tensors, path)
    path.chmod(mode)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
