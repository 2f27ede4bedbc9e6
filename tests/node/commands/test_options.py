"""Mistakes that can be seen without a network are told before anything is started."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from node.commands.options import FiniteRange, meant_as_address
from node.trainer import spare_process
from tests.support.command_line import Cli, run_command

PEER = "12D3KooWB4TYiYwXED7sAtDgh7FWPKYN3qE48tRWxnTBQadUSChs"
WHOLE = f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """In an empty folder; whoever starts the training process before a mistake is told fails."""

    def too_early() -> None:
        raise AssertionError("a process was started for a command that cannot work")

    monkeypatch.setattr(spare_process, "prepare", too_early)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return functools.partial(run_command, monkeypatch, capsys)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e300"])
@pytest.mark.parametrize(
    "command",
    [
        ("seed", "run.toml", "--max-memory"),
        ("seed", "run.toml", "--max-gb-per-day"),
        ("join", WHOLE, "--up-mbps"),
        ("join", WHOLE, "--down-mbps"),
        ("peers", "--light", WHOLE, "--timeout"),
        ("gateway", WHOLE, "--time-limit"),
        ("train", "-o", "model", "--save-every"),
    ],
)
def test_numbers_are_finite(cli: Cli, command: tuple[str, ...], number: str) -> None:
    cli(*command, number).refuses(command[-1], f"blockswarm {command[0]} --help")


@pytest.mark.parametrize(
    "command",
    [("train", "-o", ""), ("eval", ""), ("seed", "run.toml", "--folder", ""), ("init", "")],
)
def test_an_empty_name_is_no_folder(cli: Cli, command: tuple[str, ...]) -> None:
    """As of a variable of the shell that is not set: it would be the current folder."""
    cli(*command).refuses("The name is empty", f"blockswarm {command[0]} --help")


def test_bounds_hold_as_before() -> None:
    at_most = FiniteRange(0.0, 3.0, min_open=True)
    assert at_most.convert("1.5", None, None) == 1.5
    for text in ("0", "3.1", "x", "nan"):
        with pytest.raises(Exception, match=text):
            at_most.convert(text, None, None)


@pytest.mark.parametrize("command", [("seed", "run.toml"), ("join", WHOLE), ("serve", WHOLE)])
def test_an_ip_to_listen_on(cli: Cli, command: tuple[str, ...]) -> None:
    cli(*command, "--listen", "nonsense").refuses("'nonsense' is not an IP", "--listen")


def test_an_address_to_announce_or_to_relay_through(cli: Cli) -> None:
    cli("serve", WHOLE, "--announce", "no address").refuses("'no address'", "--announce")
    cli("join", WHOLE, "--relay", "/ip4/1.2.3.4").refuses("whom to dial")
    cli("serve", WHOLE, "--port", 70000).refuses("--port")


@pytest.mark.parametrize("command", ["join", "serve", "gateway", "status", "assemble"])
def test_an_address_is_looked_at_first(cli: Cli, command: str) -> None:
    more = ("-o", "model") if command == "assemble" else ()
    cli(command, WHOLE, "blah", *more).refuses("'blah' does not say whom to dial", "/p2p/12D3Koo")


@pytest.mark.parametrize("command", ["seed", "generate"])
def test_an_address_without_its_peer_is_no_file(cli: Cli, command: str) -> None:
    cli(command, "/ip4/1.2.3.4/tcp/4001").refuses("does not say whom to dial", "/p2p/12D3Koo")


def test_a_file_of_that_name_is_a_file(tmp_path: Path) -> None:
    assert meant_as_address(WHOLE) and meant_as_address("/dns/host.example")
    assert not meant_as_address("run.toml") and not meant_as_address(str(tmp_path))


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/nope"])
def test_folders_that_cannot_be_made(cli: Cli, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("mine")
    cli("demo", "-o", folder).refuses(f"cannot make the folder {folder}", "-o")
    assert (tmp_path / "file").read_text() == "mine"
