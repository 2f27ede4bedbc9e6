"""The command line: what it prints where, what it refuses and how, and what a kill leaves."""

from __future__ import annotations

import errno
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import node.commands.local
import node.machine.tensor_file
from node.local.training import CHECKPOINT
from protocol.version import PACKAGE_VERSION
from tests.support.command_line import Cli, Result, run_command

SHAPE = "--blocks 2 --layers 1 --width 16 --heads 2 --context 16 --batch 2".split()  # noqa: SIM905
TINY = [*SHAPE, "--evaluate-bytes", "256", "--threads", "1"]
STEPS = 120


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Run a command in this process."""

    threads = torch.get_num_threads()
    yield partial(run_command, monkeypatch, capsys)
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(1000)))
    return path


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An uninterrupted run, through the installed command."""
    folder = tmp_path_factory.mktemp("model") / "m"
    done = start("train", "-o", folder, "--data", text, "--steps", STEPS, "--json", *TINY)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    assert f"step {STEPS}/{STEPS}" in err and "Traceback" not in err
    return folder, json.loads(out)


@pytest.fixture
def model(trained: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy to do as one likes with."""
    for name in ("model.safetensors", "manifest.json"):
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / name).write_bytes((trained[0] / name).read_bytes())
    return tmp_path / "m"


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "node.cli", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def refused(result: Result, *words: str) -> None:
    """One line that says what is wrong, one that says what to try, exit code 2."""
    lines = result.err.splitlines()
    assert result.code == 2, result
    assert result.out == ""
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("  try: ")
    for word in words:
        assert word in result.err


# Help.


def test_help_is_light_and_teaches() -> None:
    code = "import sys, node.cli; print({'torch', 'numpy', 'rich', 'hivemind'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_help_and_version(cli: Cli) -> None:
    assert cli("--version").out.startswith(f"blockswarm {PACKAGE_VERSION} (protocol ")
    for arguments in ((), ("--help",), ("-h",)):
        result = cli(*arguments)
        assert result.code == 0 and "blockswarm train -o model/" in result.out
    for command in ("train", "eval", "generate", "probe"):
        result = cli(command, "--help")
        assert result.code == 0 and "--threads" in result.out and result.err == ""


# The commands.


def test_train_tells_its_result_as_json(trained: tuple[Path, Any]) -> None:
    folder, facts = trained
    assert facts["model"] == str(folder) and facts["steps"] == STEPS
    assert facts["ce_nats"] < 3.0 < facts["ce_before_nats"]
    assert len(facts["block_ce_nats"]) == 2
    assert 0 <= facts["leak_nats"] < 0.05
    assert sorted(os.listdir(folder)) == ["manifest.json", "model.safetensors"]


def test_train_for_a_person(cli: Cli, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "my model"
    result = cli("train", "-o", out, "--data", text, "--steps", 3, *TINY)
    assert result.code == 0
    assert "honest CE over" in result.out and "composed" in result.out
    assert f"blockswarm generate '{out}' --prompt" in result.out
    assert "step 3/3" in result.err
    refused(cli("train", "-o", out, "--data", text, *TINY), "holds a model already", "--overwrite")
    refused(cli("train", "-o", out, "--resume"), "has ended", "blockswarm eval")
    again = cli("train", "-o", out, "--data", text, "--steps", 2, "--overwrite", *TINY)
    assert again.code == 0


def test_eval(cli: Cli, trained: tuple[Path, Any], text: Path) -> None:
    folder, facts = trained
    result = cli("eval", folder, "--limit-bytes", 256, "--json")
    found = json.loads(result.out)
    assert found["ce_nats"] == pytest.approx(facts["ce_nats"])
    assert found["perplexity"] == pytest.approx(2 ** found["bits_per_byte"])
    assert cli("eval", folder, "--split", "valid", "--data", text).out.count("nats per byte") == 3
    assert "left out" in cli("eval", folder, "--without", 0).out
    refused(cli("eval", folder, "--without", 2), "no block 2", "0 to 1")
    refused(cli("eval", folder, "--without", 0, "--without", 1), "every block", "--without")


def test_probe(cli: Cli, trained: tuple[Path, Any]) -> None:
    found = json.loads(cli("probe", trained[0], "--json").out)
    assert [row["block"] for row in found["rows"]] == [0, 1]
    assert found["leaking_blocks"] == []
    assert "no block reads its target (limit" in cli("probe", trained[0]).out


def test_generate(cli: Cli, trained: tuple[Path, Any]) -> None:
    folder = trained[0]

    def write(*options: object) -> Any:
        command = ("generate", folder, "--prompt", "10 green", "--length", 40, "--json")
        return json.loads(cli(*command, *options).out)

    greedy = write("--greedy")
    assert greedy == write("--temperature", 0, "--seed", 5) == write("--top-k", 1)
    assert greedy["length_bytes"] == 40 == len(bytes.fromhex(greedy["hex"]))
    assert write("--seed", 1) == write("--seed", 1) != write("--seed", 2)
    hot = write("--temperature", 100)  # nearly any byte, so not UTF-8
    assert "\ufffd" in hot["text"] and len(bytes.fromhex(hot["hex"])) == 40
    plain = cli("generate", folder, "--prompt", "10 green", "--length", 40, "--greedy")
    assert plain.out == "10 green" + greedy["text"] + "\n"
    assert cli("generate", folder, "--prompt", "", "--length", 2).code == 0
    odd = os.fsdecode(b"\xff\xfe")  # typed bytes that are not UTF-8
    assert json.loads(cli("generate", folder, "--prompt", odd, "--json").out)["prompt"] == "��"


def test_any_byte_goes_into_a_pipe_and_a_closed_pipe_is_no_crash(model: Path) -> None:
    command = [sys.executable, "-m", "node.cli", "generate", str(model), "--length", "100000"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    with subprocess.Popen(
        [*command, "--temperature", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert len(process.stdout.read(300)) == 300
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_what_fails_before_the_first_byte_writes_nothing(cli: Cli, model: Path) -> None:
    result = cli("generate", model, "--prompt", "def ", "--mode", "denoise")
    refused(result, "denoise")
    assert result.out == ""


# Output that cannot be written.

FULL = Path("/dev/full")


def in_a_shell(line: str, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    command = f"{shlex.quote(sys.executable)} -m node.cli {line}"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=60
    )


@pytest.mark.skipif(not FULL.exists(), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("line", ["--help", "--version", "init {}/run.toml", "doctor --help"])
def test_a_full_disk_behind_standard_output(tmp_path: Path, line: str, unbuffered: str) -> None:
    done = in_a_shell(f"{line.format(tmp_path)} > {FULL}", unbuffered)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    error, hint = done.stderr.splitlines()
    assert error == "error: cannot write to standard output: No space left on device"
    assert hint.startswith("  try: ")


@pytest.mark.parametrize(
    ("redirected", "words"), [(">&-", "is closed"), ("1</dev/null", "Bad file descriptor")]
)
def test_a_standard_output_that_is_none(redirected: str, words: str) -> None:
    done = in_a_shell(f"--help {redirected}")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    error, hint = done.stderr.splitlines()
    assert "standard output" in error and words in error and hint.startswith("  try: ")


def test_without_standard_error_remarks_go_nowhere() -> None:
    done = in_a_shell("traim 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_reader_that_leaves_hears_nothing() -> None:
    done = in_a_shell("--help | true; exit ${PIPESTATUS[0]}")
    assert done.stderr == "", done


# Bad input.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "nowhere.txt"], ["no such file or folder", "nowhere.txt"]),
        (["--data", "wikitext2"], ["did you mean --data wikitext-2"]),
        (["--data", "EMPTY"], ["is empty"]),
        (["--data", "SHORT"], ["too short"]),
        (["--data", "SMALL"], ["one window of 16 needs 17", "--context"]),
        (["--blocks", "0"], ["blocks is 0", "between 1 and"]),
        (["--blocks", "two"], ["'two' is not a valid integer", "blockswarm train --help"]),
        (["--width", "15"], ["width 15"]),
        (["--steps", "0"], ["steps is 0"]),
        (["--sigma-min", "10", "--sigma-max", "10"], ["sigma_min 10 is not below sigma_max 10"]),
        (["--sigma-min", "nan"], ["sigma_min is nan"]),
        (["--sigma-min", "0.5"], ["sigma_min 0.5", "the limit is 0.05", "--sigma-min"]),
        (["--sigma-min", "1e-300"], ["sigma_min 1e-300", "the limit is 0.05", "--sigma-min"]),
        (["--learning-rate", "50"], ["learning_rate is 50", "at most 10"]),
        (["--coupling", "telepathy"], ["telepathy", "independent", "look_ahead"]),
        (["--objective", "luck"], ["luck", "bayes"]),
        (["--objective", "edm"], ["independent blocks only", "--coupling independent"]),
        (["--device", "abacus"], ["no device 'abacus'", "cpu"]),
        (["--threads", "0"], ["threads is 0"]),
        (["--seed", "-1"], ["-1 is not in the range"]),
        (["--learning-rate", "0"], ["learning_rate is 0"]),
        (["--resume"], ["nothing to resume"]),
        (["--nonsense"], ["No such option", "blockswarm train --help"]),
    ],
)
def test_train_refuses(
    cli: Cli, text: Path, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    files = {"EMPTY": b"", "SHORT": b"ab", "SMALL": b"words of text\n" * 12}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    options = [str(tmp_path / o) if o in files else o for o in options]
    refused(cli("train", "-o", tmp_path / "m", "--data", text, *TINY, *options), *words)
    assert not (tmp_path / "m").exists()


def test_train_refuses_a_folder_it_cannot_write(cli: Cli, text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in ("file", "file/model"):
        refused(
            cli("train", "-o", tmp_path / out, "--data", text, *TINY), "cannot write", out, "choose"
        )


def test_other_mistakes(cli: Cli, model: Path, tmp_path: Path) -> None:
    refused(cli("traim"), "No such command 'traim'", "blockswarm --help")
    refused(cli("train"), "Missing option '-o'")
    refused(cli("eval", tmp_path / "nowhere"), "no such folder")
    refused(cli("generate", tmp_path), "not a model folder", "blockswarm train -o")
    refused(cli("generate", model, "--temperature", -1), "temperature is -1")
    refused(cli("generate", model, "--top-k", 300), "top-k is 300")
    refused(cli("generate", model, "--length", 0), "--length")
    refused(cli("generate", model, "--device", "cuda:77"), "no device")
    refused(cli("probe", model, "--data", tmp_path / "no.txt"), "no such file")
    (tmp_path / "small.txt").write_text("words of text\n" * 12)
    refused(cli("eval", model, "--data", tmp_path / "small.txt"), "the test split of small.txt")
    manifest = json.loads((model / "manifest.json").read_text())
    manifest["data"]["spec"] = str(tmp_path / "gone.txt")
    (model / "manifest.json").write_text(json.dumps(manifest))
    refused(cli("eval", model), "gone.txt", "--data")


def test_damaged_models_are_refused_by_every_command(cli: Cli, model: Path) -> None:
    path = model / "model.safetensors"
    whole = {name: value.clone() for name, value in load_file(path).items()}
    name = "block.1.head.bias"
    damages = {
        "block 1 is missing": {k: v for k, v in whole.items() if not k.startswith("block.1.")},
        "block 1 was altered": {**whole, name: whole[name] + 1},
        "has the shape (7,)": {**whole, name: torch.zeros(7)},
    }
    for words, tensors in damages.items():
        save_file(tensors, path)
        for command in ("eval", "probe", "generate"):
            refused(cli(command, model), words)
    assert cli("generate", model, "--without", 1, "--length", 3).code == 0


# Kills, stops and full disks.


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)  # between two looks


def test_kill_9_and_resume_ends_in_the_same_bits(
    cli: Cli, trained: tuple[Path, Any], text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    command = ("train", "-o", folder, "--data", text, "--steps", STEPS, "--save-every", 0, *TINY)
    moment = random.Random()
    process = start(*command)
    until((folder / CHECKPOINT).exists, process)
    time.sleep(moment.uniform(0, 0.5))  # any moment will do: that is what is tested
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    refused(cli(*command), "cut off", f"blockswarm train --resume -o {folder}")
    resume = ("train", "--resume", "-o", folder)
    refused(cli(*resume, "--steps", 7), "--steps 7", f"({STEPS})")
    refused(cli(*resume, "--overwrite"), "exclude each other")
    assert cli(*resume, "--steps", STEPS, "--evaluate-bytes", 256, "--json").code == 0
    assert weights(folder) == weights(trained[0])
    assert sorted(os.listdir(folder)) == ["manifest.json", "model.safetensors"]


def test_ctrl_c_saves_and_says_how_to_go_on(
    cli: Cli, trained: tuple[Path, Any], text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    process = start("train", "-o", folder, "--data", text, "--steps", STEPS, *TINY)
    until((folder / CHECKPOINT).exists, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == ""
    assert err.endswith(f"to go on:\n  blockswarm train --resume -o {folder}\n")
    assert "saved at step" in err and "Traceback" not in err
    assert cli("train", "--resume", "-o", folder, "--evaluate-bytes", 256).code == 0
    assert weights(folder) == weights(trained[0])


def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(
    cli: Cli, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[Path] = []
    save = node.machine.tensor_file.save_file

    def full_after_two(tensors: Any, path: Path, metadata: Any) -> None:
        writes.append(path)
        if len(writes) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path, metadata)

    monkeypatch.setattr(node.machine.tensor_file, "save_file", full_after_two)
    folder = tmp_path / "m"
    command = ("train", "-o", folder, "--data", text, "--steps", 20, "--save-every", 0, *TINY)
    result = cli(*command)
    assert result.code == 2 and "Traceback" not in result.err
    assert "the disk is full" in result.err
    assert f"blockswarm train --resume -o {folder}" in result.err.splitlines()[-1]
    monkeypatch.undo()
    assert os.listdir(folder) == [CHECKPOINT]


def test_two_trainings_in_one_folder(cli: Cli, text: Path, tmp_path: Path) -> None:
    from node.machine.atomic import hold_folder

    with hold_folder(tmp_path / "m"):
        refused(
            cli("train", "-o", tmp_path / "m", "--data", text, *TINY), "another process is training"
        )
