"""`blockswarm init`: a file that teaches, never over another one, and what to type next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from node.commands.init import init, operator_commands, run_summary
from protocol.errors import UsageError
from swarm.run_template import PRESETS, preset
from swarm.runfile import RunFileError, parse


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(init, list(map(str, arguments)))


def test_init_writes_run_toml_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke()
    assert result.exit_code == 0
    assert parse(Path("run.toml").read_bytes()) == preset("tiny", "tiny")
    assert "blockswarm seed run.toml" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize("name", PRESETS)
def test_options(name: str, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "my run.toml"
    result = invoke(path, "--preset", name, "--name", "Our run", "--seed", 5)
    assert result.exit_code == 0
    assert parse(path.read_bytes()) == preset(name, "Our run", 5)
    assert f"blockswarm seed '{path}'" in result.output


def test_no_file_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine")
    result = invoke(path)
    assert isinstance(result.exception, UsageError)
    assert "exists already" in result.exception.message
    assert f"blockswarm init {path} --force" in result.exception.hint
    assert path.read_text() == "mine"
    assert invoke(path, "--force", "--preset", "small").exit_code == 0
    assert parse(path.read_bytes()) == preset("small", "small")


def test_bad_name(tmp_path: Path) -> None:
    result = invoke(tmp_path / "run.toml", "--name", "a\nb")
    assert isinstance(result.exception, RunFileError)
    assert "name must be" in result.exception.message
    assert not list(tmp_path.iterdir())


def test_unknown_preset(tmp_path: Path) -> None:
    assert "huge" in invoke(tmp_path / "run.toml", "--preset", "huge").output


def test_summary() -> None:
    assert "1.9 million parameters in 4 blocks, 300 rounds of 4 s, 20 min" in run_summary(
        preset("tiny", "x")
    )
    assert "MB in all, both ways" in run_summary(preset("tiny", "x"))  # it is over within a day
    week = run_summary(preset("large", "x"))
    assert "7 days in all" in week and "GB per day, both ways" in week


def test_the_command_line_stays_quick() -> None:
    """Neither `--help` nor `init` loads torch; `--help` does not even load numpy."""
    code = (
        "import sys, node.commands.init, swarm.run_template as template\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "template.emit(template.preset('tiny', 'x'))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_exports() -> None:
    assert [command.name for command in operator_commands] == ["init"]
