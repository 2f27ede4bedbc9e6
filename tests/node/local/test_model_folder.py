"""Model folders: what is saved loads again, and whatever was damaged is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from node.local.model_folder import (
    data_sha256,
    data_spec,
    load_model,
    read_manifest,
    save_model,
    tensors_digest,
)
from protocol.errors import ModelError, UsageError
from swarm.learning.composition import ComposedModel
from swarm.learning.worker import initial_block
from swarm.run import ModelShape, Run

CPU = torch.device("cpu")
RUN = Run(ModelShape(blocks=3, layers=1, width=16, heads=2, context=8))
X = torch.arange(8).view(1, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = ComposedModel(RUN, [initial_block(RUN, b) for b in range(3)], (0.5, 0.25, 0.25), 1.25)
    save_model(tmp_path / "m", model, [1, 2, 3], {"data": {"spec": "python"}})
    return tmp_path / "m"


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}  # off the file
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def sign_again(folder: Path, block: int) -> None:
    """What somebody who alters a block would do about its digest."""
    prefix = f"block.{block}."
    tensors = load_file(folder / "model.safetensors")
    state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    edit_manifest(folder, lambda m: m["blocks"][block].update(digest=tensors_digest(state)))


def test_round_trip(folder: Path) -> None:
    model, manifest = load_model(folder, CPU)
    assert model.run == RUN
    assert model.weights == (0.5, 0.25, 0.25) and model.temperature == 1.25
    assert [entry["version"] for entry in manifest["blocks"]] == [1, 2, 3]
    want = ComposedModel(RUN, [initial_block(RUN, b) for b in range(3)], (0.5, 0.25, 0.25), 1.25)
    assert torch.equal(model.log_probs(X), want.log_probs(X))
    assert data_spec(read_manifest(folder)) == "python"


def test_blocks_can_be_left_out(folder: Path) -> None:
    edit_tensors(folder, lambda t: [t.pop(k) for k in list(t) if k.startswith("block.1.")])
    with pytest.raises(ModelError, match="block 1 is missing") as caught:
        load_model(folder, CPU)
    assert "--without 1" in caught.value.hint
    model, _ = load_model(folder, CPU, frozenset({1}))
    assert model.blocks[1] is None
    with pytest.raises(UsageError, match="no block 3"):
        load_model(folder, CPU, frozenset({3}))
    with pytest.raises(UsageError, match=r"every block of .* is left out") as left_out:
        load_model(folder, CPU, frozenset({0, 1, 2}))
    assert "--without" in left_out.value.hint


def test_a_lost_entry_is_refused_by_its_number(folder: Path) -> None:
    edit_manifest(folder, lambda m: m["blocks"].pop(1))
    for missing in (None, [], [0, 2], "1", [[1]], {"1": 1}):  # whatever a manifest may hold
        edit_manifest(folder, lambda m, said=missing: m.update(assembly={"missing": said}))
        with pytest.raises(ModelError, match=r"block 1 is missing from .*manifest\.json") as caught:
            load_model(folder, CPU)
        assert "--without 1" in caught.value.hint
    assert load_model(folder, CPU, frozenset({1}))[0].blocks[1] is None


def test_a_model_assembled_without_a_block_loads(folder: Path) -> None:
    model = load_model(folder, CPU)[0].without(1)
    save_model(folder, model, [1, None, 3], {"assembly": {"missing": [1]}})
    assert [block is None for block in load_model(folder, CPU)[0].blocks] == [False, True, False]
    with pytest.raises(UsageError, match="is left out"):
        load_model(folder, CPU, frozenset({0, 2}))


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_both_files_have_the_rights_of_any_new_file(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        save_model(
            tmp_path, ComposedModel(RUN, [initial_block(RUN, b) for b in range(3)]), [0] * 3, {}
        )
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"model.safetensors": mode, "manifest.json": mode}


def test_loading_one_brings_no_compiler_along(folder: Path) -> None:
    """A module on torch's device `meta` would: sympy with it, seconds of every command."""
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from node.local.model_folder import load_model\n"
        f"load_model(Path({str(folder)!r}), torch.device('cpu'))\n"
        "sys.exit('sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_is_no_model_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match="not a model folder, it is a file") as told:
        load_model(tmp_path / "notes.txt", CPU)
    assert "train -o" in told.value.hint and "notes.txt" not in told.value.hint


NAME = "block.2.layers.0.up.weight"


@pytest.mark.parametrize(
    ("change", "resign", "message"),
    [
        (lambda t: t[NAME].view(-1)[:1].add_(1e-3), False, "block 2 was altered"),
        (lambda t: t.pop(NAME), True, "block 2 lacks the tensor"),
        (lambda t: t.update({NAME: torch.zeros(3, 3)}), True, r"shape \(3, 3\).*needs \(64, 16\)"),
        (lambda t: t.update({NAME: t[NAME].half()}), True, "float16"),
        (lambda t: t[NAME].view(-1)[:1].fill_(torch.nan), True, "not finite"),
        (lambda t: t.update({"block.2.extra": torch.zeros(1)}), True, "unknown tensor extra"),
    ],
)
def test_altered_weights(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], resign: bool, message: str
) -> None:
    edit_tensors(folder, change)
    if resign:
        sign_again(folder, 2)
    with pytest.raises(ModelError, match=message):
        load_model(folder, CPU)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("run"),
        lambda m: m.pop("blocks"),
        lambda m: m.update(blocks=[1, 2]),
        lambda m: m.update(blocks=None),
        lambda m: m.update(blocks=[{"block": "x", "digest": ""}]),
        lambda m: m.update(blocks=[{"block": float("inf"), "digest": ""}]),
        lambda m: m.update(blocks=[]),
        lambda m: m["run"]["model"].update(blocks=0),
        lambda m: m["run"]["model"].update(width=32),
        lambda m: m["run"]["model"].update(width=32768, layers=256, heads=1),  # terabytes
        lambda m: m["run"].update(surprise=1),
        lambda m: m.pop("composition"),
        lambda m: m["composition"].update(kind="pickle"),
        lambda m: m["composition"].update(weights=[1.0]),
        lambda m: m["composition"].update(weights=[1.0, float("nan"), 1.0]),
        lambda m: m["composition"].update(temperature=0.0),
        lambda m: m["composition"].update(temperature="warm"),
        lambda m: m["composition"].update(temperature=10**400),
        lambda m: m["composition"].update(weights=[1.0, 10**400, 1.0]),
        lambda m: m.update(format="other"),
        lambda m: m.update(format_version=99),
    ],
)
def test_altered_manifests(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit_manifest(folder, change)
    with pytest.raises(ModelError) as caught:
        load_model(folder, CPU)
    assert caught.value.hint


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b" " * (1 << 21)])
def test_manifests_that_are_none(folder: Path, text: bytes) -> None:
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"manifest\.json"):
        load_model(folder, CPU)


def test_missing_files(folder: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_model(folder / "nowhere", CPU)
    with pytest.raises(ModelError, match="not a model folder"):
        load_model(folder.parent, CPU)
    with pytest.raises(ModelError, match="not a model folder"):
        load_model(folder / "manifest.json", CPU)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(folder, CPU)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load_model(folder, CPU)


def test_a_strange_data_field_is_no_harm() -> None:
    for data in (None, [], "x", {"spec": 3, "sha256": 3}, {}):
        assert data_spec({"data": data}) == "python"
        assert data_sha256({"data": data}) is None
