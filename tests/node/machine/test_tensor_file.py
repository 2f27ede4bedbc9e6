"""Tensors with their facts: back as they were, or a clear word that the file is no good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from node.machine.tensor_file import DamagedFile, read_tensors, write_tensors


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "file"
    turned = torch.arange(6.0).view(2, 3).T  # not contiguous
    wanted = torch.ones(2, requires_grad=True)
    write_tensors(path, {"turned": turned, "wanted": wanted}, {"step": 7, "curve": [[1, 2.5]]})
    tensors, facts = read_tensors(path)
    assert torch.equal(tensors["turned"], turned) and torch.equal(tensors["wanted"], wanted)
    assert facts == {"step": 7, "curve": [[1, 2.5]]}
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_no_file_is_not_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "nothing")


@pytest.mark.parametrize("about", [None, {"other": "{}"}, {"blockswarm": "[1]"}])
def test_a_file_of_somebody_elses(tmp_path: Path, about: dict[str, str] | None) -> None:
    path = tmp_path / "file"
    save_file({"a": torch.zeros(2)}, path, about)
    with pytest.raises(DamagedFile):
        read_tensors(path)


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(DamagedFile):
        read_tensors(tmp_path)


@given(st.data())
def test_a_file_that_was_cut_or_changed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "file"
    tensors = {"a": torch.arange(4.0)}
    write_tensors(path, tensors, {"step": 7})
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole[:cut])
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(0, 255))
    path.write_bytes(bytes(damaged))
    with pytest.raises(DamagedFile):
        read_tensors(path)


def test_the_facts_are_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, {"a": torch.zeros(1)}, {"step": 7})
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    assert json.loads(header["__metadata__"]["blockswarm"]) == {"step": 7}
