"""`serve` and `generate ADDRESS`: what a person sees of mistakes, and the run of a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conftest import MakeModel, MakeRun
from loopback import _no_daemon_left  # noqa: F401

from node.cli import cli
from node.cli_serve import is_address
from node.model_folder import save_model
from node.serve_host import check_blocks, open_folder, versions_kept
from protocol.errors import BlockswarmError, UsageError
from swarm.runfile import parse, run_id

PEER = "12D3KooWB4TYiYwXED7sAtDgh7FWPKYN3qE48tRWxnTBQadUSChs"


def test_an_address_is_not_a_folder() -> None:
    assert is_address(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}")
    assert is_address(f"/dns4/example.org/tcp/1/p2p/{PEER}")
    assert not is_address("model/")
    assert not is_address("/ip4/backup/model")


def test_nothing_to_serve() -> None:
    result = CliRunner().invoke(cli, ["serve"])
    assert isinstance(result.exception, UsageError)
    assert "--model" in result.exception.hint


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_nobody_at_the_address(command: str) -> None:
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"
    result = CliRunner().invoke(cli, [command, address])
    assert isinstance(result.exception, BlockswarmError)
    assert "no peer answers" in result.exception.message


def test_unknown_modes_are_refused() -> None:
    result = CliRunner().invoke(cli, ["generate", "model", "--mode", "telepathy"])
    assert result.exit_code == 2 and "one-sweep" in result.output


def test_equal_folders_are_one_run_and_others_are_not(
    tmp_path: Path, tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    device = torch.device("cpu")
    model = tiny_model(tiny_run(), weights=(1.0, 0.0, 3.0), temperature=0.5)
    for name in ("one", "two"):
        save_model(tmp_path / name, model, [3, 4, None], {})
    block = model.blocks[1]
    assert block is not None
    with torch.no_grad():
        block.head.bias += 1
    save_model(tmp_path / "other", model, [3, 4, 5], {})
    one, two, other = (open_folder(tmp_path / n, device) for n in ("one", "two", "other"))
    assert run_id(one.run_file) == run_id(two.run_file) != run_id(other.run_file)
    assert parse(one.run_file).run.model == model.run.model
    assert one.versions == {0: 3, 1: 4, 2: 0}
    assert one.model.weights == (1.0, 0.0, 3.0)


def test_blocks_that_are_not_there(tiny_run: MakeRun) -> None:
    check_blocks(tiny_run(), [0, 2])
    with pytest.raises(UsageError, match="no block 3"):
        check_blocks(tiny_run(), [3])


def test_staggered_versions_need_more_of_them(tiny_run: MakeRun) -> None:
    assert versions_kept(tiny_run(coupling="independent")) == 2
    assert versions_kept(tiny_run(coupling="relay")) == 4
