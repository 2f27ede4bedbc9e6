"""`blockswarm init`: a file that teaches, never over another one, and what to type next."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from node.commands.init import init, operator_commands, summary
from protocol.errors import UsageError
from swarm.cost import parameter_counts
from swarm.run import ModelShape, Noise
from swarm.run_template import PRESETS, TEMPLATE, emit, preset
from swarm.runfile import RunFileError, parse

DOCS = Path(__file__).resolve().parent.parent / "docs" / "runfile.md"


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
    with pytest.raises(UsageError, match="huge"):
        preset("huge", "x")


def test_presets_have_the_sizes_that_help_states() -> None:
    total = {
        name: sum(parameter_counts(preset(name, name).run.model, "bayes")) / 1e6 for name in PRESETS
    }
    assert total["tiny"] < 2 and round(total["small"]) == 52 and round(total["large"]) == 307
    assert (
        preset("tiny", "x").run.model == ModelShape() and preset("tiny", "x").run.noise == Noise()
    )


def test_summary() -> None:
    assert "1.9 million parameters in 4 blocks, 120 rounds of 12 s, 24 minutes" in summary(
        preset("tiny", "x")
    )
    assert "7 days in all" in summary(preset("large", "x"))


def test_every_field_is_explained() -> None:
    """A comment stands above every field or group of fields, and docs/runfile.md has each."""
    above, section, docs = "", "", DOCS.read_text()
    for line in TEMPLATE.splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        elif " = " in line and not line.startswith("#"):
            assert above.startswith("#") or " = " in above or line.startswith("format"), line
            assert f"`{section}{line.partition(' = ')[0]}`" in docs, line
        above = line


def test_floats_survive() -> None:
    runfile = preset("tiny", "x")
    training = replace(runfile.run.training, learning_rate=1e-05, clip_norm=1e16)
    runfile = replace(runfile, run=replace(runfile.run, training=training))
    assert parse(emit(runfile)) == runfile


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
