"""`serve` and `generate ADDRESS`: what a person sees, and the run of a model folder."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner

from node.cli import cli
from node.commands import serve as cli_serve
from node.commands.serve import is_address
from node.local.model_folder import save_model
from node.serving.client import NobodyServes
from node.serving.host import check_blocks, new_template, open_folder, versions_kept
from node.serving.output import Order
from node.serving.server import BlockServer
from node.serving.trained import trained_server
from protocol.errors import BlockswarmError, UsageError
from protocol.limits import SWEEP_HOPS_MAX
from swarm.run_template import emit, preset
from swarm.runfile import parse, run_id, with_start
from tests.conftest import MakeModel, MakeRun
from tests.support.loopback import _no_daemon_left  # noqa: F401

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


def test_a_folder_that_cannot_be_made(
    tmp_path: Path, tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    save_model(tmp_path / "model", tiny_model(tiny_run()), [1, 1, 1], {})
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", "/proc/nope"):
        command = ["serve", "--model", str(tmp_path / "model"), "--folder", str(folder)]
        result = CliRunner().invoke(cli, command)
        assert isinstance(result.exception, UsageError), result.exception
        assert f"cannot make the folder {folder}" in result.exception.message


# More blocks than a sweep can have hops.


def many_blocks(blocks: int = SWEEP_HOPS_MAX + 1) -> bytes:
    run = preset("tiny", "long")
    shape = replace(run.run.model, blocks=blocks, coupling="independent")
    exchange = replace(run.exchange, snapshot_every=64)
    whole = replace(run, run=replace(run.run, model=shape), exchange=exchange)
    return with_start(emit(whole), int(time.time()))


@pytest.mark.parametrize("command", ["serve", "generate", "gateway"])
def test_a_run_that_cannot_be_served_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def fetch(*_: object) -> bytes:
        return many_blocks()

    monkeypatch.setattr("node.network.client.Guest.fetch_run", fetch)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    result = CliRunner().invoke(cli, [command, f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"])
    assert isinstance(result.exception, UsageError), result.exception
    assert "33 blocks" in result.exception.message and "32 at most" in result.exception.message
    assert "assemble" in result.exception.hint


def test_hosts_of_such_a_run_only_train() -> None:
    said: list[str] = []
    network = cast(Any, SimpleNamespace())
    run = parse(many_blocks()).run
    assert trained_server(network, b"r" * 32, run, None, said.append) is None
    assert "33 blocks" in said[0] and "only trains" in said[0]
    with pytest.raises(UsageError, match="33 blocks"):
        BlockServer(network, b"r" * 32, run)


# What `serve` says.


def test_it_is_serving_when_it_holds_something(capsys: pytest.CaptureFixture[str]) -> None:
    async def invitations() -> list[str]:
        return ["/ip4/ADDRESS"]

    async def main() -> list[list[str]]:
        host = SimpleNamespace(
            announced=asyncio.Event(),
            new_blocks=asyncio.Queue(),
            settings=SimpleNamespace(blocks=(0, 1, 2)),
            network=SimpleNamespace(invitations=invitations),
        )
        telling = asyncio.create_task(cli_serve._tell(cast(Any, host)))
        heard: list[list[str]] = []

        async def listen() -> None:
            for _ in range(8):
                await asyncio.sleep(0)
            heard.append(capsys.readouterr().err.splitlines())

        await listen()
        host.announced.set()
        await listen()
        for blocks in ((1, 0), (2,)):
            for block in blocks:
                host.new_blocks.put_nowait(block)
            await listen()
        await telling
        return heard

    nothing, waiting, first, more = asyncio.run(main())
    assert nothing == []
    assert len(waiting) == 1 and waiting[0].startswith("waiting for the weights of block 0, 1, 2")
    assert first == ["serving block 0, 1; let it write with:", "  blockswarm generate /ip4/ADDRESS"]
    assert more == ["serving block 2, too"]


def test_a_block_is_new_once(tiny_run: MakeRun) -> None:
    run = tiny_run()
    heard: list[int] = []
    server = BlockServer(cast(Any, SimpleNamespace(transport=None)), b"r" * 32, run)
    server.new_block = heard.append
    for version, (block, digest) in enumerate([(1, b"a"), (1, b"b"), (0, b"c"), (1, b"d")]):
        server.offer(block, version, digest, new_template(run, block))
    assert heard == [1, 0]


# What `generate ADDRESS` writes.


class FakeSwarm:
    """Takes the place of a network and its hosts. `pieces`: what they write before they fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pieces: list[bytes]) -> None:
        self.orders: list[Order] = []

        async def fetch(*_: object) -> bytes:
            return with_start(emit(preset("tiny", "tiny")), int(time.time()))

        @contextlib.asynccontextmanager
        async def network(*_: object) -> AsyncIterator[object]:
            yield None

        async def close() -> None:
            pass

        def output(_: object, order: Order) -> object:
            self.orders.append(order)
            return SimpleNamespace(write=write)

        async def write() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
            raise NobodyServes("no host of this run serves a block")

        monkeypatch.setattr("node.network.client.Guest.fetch_run", fetch)
        monkeypatch.setattr("node.network.client.Guest.network", network)
        monkeypatch.setattr(
            "node.serving.client.SweepClient", lambda *_: SimpleNamespace(close=close)
        )
        monkeypatch.setattr("node.serving.output.Output", output)

    def generate(self, *options: str) -> Any:
        address = f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"
        return CliRunner().invoke(cli, ["generate", address, "--prompt", "def ", *options])


@pytest.mark.parametrize(("pieces", "written"), [([], ""), ([b"a", b"b"], "def ab")])
def test_what_fails_before_the_first_piece_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, pieces: list[bytes], written: str
) -> None:
    result = FakeSwarm(monkeypatch, pieces).generate()
    assert isinstance(result.exception, NobodyServes)
    assert result.stdout == written


def test_blocks_are_left_out_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = FakeSwarm(monkeypatch, [])
    swarm.generate("--without", "0", "--without", "2")
    assert [order.without for order in swarm.orders] == [(0, 2)]
    refused = swarm.generate("--without", "4").exception
    assert isinstance(refused, UsageError) and "no block 4" in refused.message
    assert len(swarm.orders) == 1
