"""train, eval, probe, generate: what a resume keeps, what a verdict goes by, what is told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import node.console.terminal
import node.local.jobs
import node.local.training
from node.local.training import CHECKPOINT, cut_off_run
from swarm.run import Noise
from tests.support.command_line import Cli, run_command

TEXT = "".join(f"{n} green bottles hanging on the wall\n" for n in range(1000))
SHAPE = "--blocks 2 --layers 1 --width 16 --heads 2 --context 16 --batch 2".split()  # noqa: SIM905
TINY = [*SHAPE, "--threads", "1", "--evaluate-bytes", "256"]


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """In a folder with a text."""
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield partial(run_command, monkeypatch, capsys)
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("default")


Train = Callable[..., Path]


@pytest.fixture
def train(cli: Cli, tmp_path: Path) -> Train:
    def run(*options: object) -> Path:
        done = cli("train", "-o", "m", "--data", "text.txt", "--steps", 5, *TINY, *options)
        assert done.code == 0, done.err
        return tmp_path / "m"

    return run


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Ctrl-C after so many steps, or never again."""

    class Flag:
        exit_code = 130

        def __init__(self, after: int | None) -> None:
            self.left = after

        def __call__(self) -> bool:
            if self.left is not None:
                self.left -= 1
            return self.left is not None and self.left < 0

    def stop(after: int | None) -> None:
        @contextmanager
        def flagged() -> Iterator[Flag]:
            yield Flag(after)

        monkeypatch.setattr(node.local.jobs, "stop_on_signals", flagged)

    return stop


@pytest.mark.parametrize(
    ("options", "rate"),
    [((), 2e-3), (("--steps", 6000), 1e-3), (("--steps", 6000, "--learning-rate", 4e-3), 4e-3)],
)
def test_the_learning_rate_is_the_usual_one_unless_it_is_given(
    cli: Cli, stops: Callable[[int | None], None], options: tuple[object, ...], rate: float
) -> None:
    stops(1)
    done = cli("train", "-o", "m", "--data", "text.txt", "--steps", 5, *TINY, *options)
    assert done.code == 130, done.err
    assert cut_off_run(Path("m")).run.training.learning_rate == rate


# probe


def test_probe_names_blocks_that_read_their_target(cli: Cli, train: Train) -> None:
    """A run may be allowed any leak; that does not acquit its blocks."""
    train("--sigma-min", 0.1, "--sigma-max", 10, "--leak-limit", 10)
    found = json.loads(cli("probe", "m", "--json").out)
    assert found["leaking_blocks"] == [0, 1]
    assert (found["leak_limit_nats"], found["run_leak_limit_nats"]) == (Noise().leak_limit_nats, 10)
    for row in found["rows"]:
        assert row["leak_nats"] == row["honest_ce_nats"] - row["teacher_forced_ce_nats"] > 0.5
    said = cli("probe", "m").out
    assert "these blocks read their target: 0, 1 (limit: a difference of 0.05 nats)" in said
    assert "--leak-limit 10;" in said


def test_probe_goes_by_a_runs_stricter_limit(cli: Cli, train: Train) -> None:
    train("--sigma-min", 20, "--sigma-max", 40, "--leak-limit", 0.01)
    found = json.loads(cli("probe", "m", "--json").out)
    assert found["leak_limit_nats"] == found["run_leak_limit_nats"] == 0.01
    said = cli("probe", "m").out
    assert "limit: a difference of 0.01 nats" in said and "--leak-limit" not in said


# The text


def test_a_text_that_has_changed_is_said(
    cli: Cli, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train()
    other = tmp_path / "other.txt"
    other.write_text(TEXT * 2)
    assert json.loads((tmp_path / "m" / "manifest.json").read_text())["data"]["spec"] == str(
        tmp_path / "text.txt"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for command in ("eval", "probe"):
        same = cli(command, "../m", "--json")  # found from here, too
        assert same.err == "" and json.loads(same.out)["data_changed"] is False
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("something new\n" * 50 + TEXT)
    for command in ("eval", "probe"):
        for typed in ((), ("--data", "text.txt"), ("--data", tmp_path / "text.txt")):
            changed = cli(command, "m", "--json", *typed)
            assert json.loads(changed.out)["data_changed"] is True
            (line,) = changed.err.splitlines()
            assert line.startswith("warning: text.txt has changed") and "trained on" in line
        own = cli(command, "m", "--json", "--data", other)
        assert own.err == "" and json.loads(own.out)["data_changed"] is None


def test_a_name_stays_a_name(cli: Cli, tmp_path: Path) -> None:
    assert cli("train", "-o", "m", "--steps", 1, *TINY).code == 0
    assert json.loads((tmp_path / "m" / "manifest.json").read_text())["data"]["spec"] == "python"


# Resuming


def test_a_resumed_run_measures_the_bytes_of_its_first_sitting(
    cli: Cli, train: Train, stops: Callable[[int | None], None]
) -> None:
    stops(2)
    command = ("train", "-o", "m", "--data", "text.txt", "--steps", 5, *TINY)
    assert cli(*command).code == 130
    assert Path("m", CHECKPOINT).exists()
    stops(None)
    kept = cli("train", "--resume", "-o", "m", "--json")
    assert json.loads(kept.out)["size_bytes"] == 256


def test_other_bytes_are_measured_before_and_after(
    cli: Cli, train: Train, stops: Callable[[int | None], None]
) -> None:
    stops(2)
    command = ("train", "-o", "m", "--data", "text.txt", "--steps", 5, *TINY)
    assert cli(*command).code == 130
    stops(None)
    again = json.loads(cli("train", "--resume", "-o", "m", "--evaluate-bytes", 1024, "--json").out)
    whole = json.loads(cli(*command[:2], "w", *command[3:], "--evaluate-bytes", 1024, "--json").out)
    for name in ("size_bytes", "ce_before_nats", "ce_nats"):
        assert again[name] == whole[name]
    assert again["size_bytes"] == 1024


def test_other_threads_are_said(cli: Cli, stops: Callable[[int | None], None]) -> None:
    stops(1)
    assert cli("train", "-o", "m", "--data", "text.txt", "--steps", 5, *TINY).code == 130
    same = cli("train", "--resume", "-o", "m", "--threads", 1)
    assert same.code == 130 and "instead of" not in same.err
    stops(None)
    other = cli("train", "--resume", "-o", "m", "--threads", 2)
    assert other.code == 0 and "2 threads instead of 1" in other.err and "last bits" in other.err


# eval


def test_every_block_has_its_bits_and_perplexity(cli: Cli, train: Train) -> None:
    train()
    found = json.loads(cli("eval", "m", "--without", 0, "--json").out)
    assert found["composition"] == "logit"
    assert found["block_bits_per_byte"] == [None, found["block_ce_nats"][1] / math.log(2)]
    assert found["block_perplexity"] == [None, math.exp(found["block_ce_nats"][1])]
    header, left_out, block, composed = cli("eval", "m", "--without", 0).out.splitlines()
    assert "left out" in left_out and "composition" not in header
    for line in (block, composed):
        assert "nats per byte = " in line and " bits per byte, perplexity " in line


def test_the_embedding_composition(cli: Cli, train: Train) -> None:
    train("--coupling", "independent")
    logit = json.loads(cli("eval", "m", "--composition", "logit", "--json").out)
    assert logit == json.loads(cli("eval", "m", "--json").out)
    chained = json.loads(cli("eval", "m", "--composition", "embedding", "--json").out)
    assert chained["composition"] == "embedding" and chained["ce_nats"] != logit["ce_nats"]
    # The chain's last block has seen all the others through z.
    assert chained["ce_nats"] == pytest.approx(chained["block_ce_nats"][-1])
    assert "embedding composition:" in cli("eval", "m", "--composition", "embedding").out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--coupling", "relay"), "these are relay"),
        ((), "these are look_ahead"),
        (("--coupling", "independent", "--objective", "plain"), "plain blocks have none"),
    ],
)
def test_what_has_no_embedding_composition(
    cli: Cli, train: Train, options: tuple[str, ...], words: str
) -> None:
    train(*options)
    cli("eval", "m", "--composition", "embedding").refuses(words, "--composition logit")
    assert cli("eval", "m", "--composition", "logit").code == 0


# Memory


def test_a_model_too_large_is_refused_at_once(cli: Cli) -> None:
    size = ("--width", 32768, "--layers", 200, "--blocks", 1000)
    cli("train", "-o", "m", "--data", "text.txt", *size).refuses("of memory", "--width")
    assert not Path("m").exists()


@pytest.mark.parametrize("command", ["train", "eval", "probe", "generate"])
def test_memory_that_runs_out_is_one_line(
    cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: object) -> Any:
        torch.empty(1 << 50)

    for name in ("train_blocks", "load_with_corpus", "load_composed"):
        monkeypatch.setattr(node.local.jobs, name, too_much)
    arguments = ("-o", "m") if command == "train" else ("m",)
    cli(command, *arguments).refuses("not enough memory", "--width" if command == "train" else "")


# Rough edges


def test_the_seeds_that_a_run_can_have(cli: Cli) -> None:
    assert "0<=x<=4294967295" in cli("train", "--help").out
    cli("train", "-o", "m", "--seed", 2**32).refuses("--seed", "4294967295")


def test_all_blocks_left_out(cli: Cli, train: Train) -> None:
    train()
    for command in ("eval", "probe", "generate"):
        both = cli(command, "m", "--without", 0, "--without", 1)
        both.refuses("every block of m is left out", "--without")
        assert "fetch" not in both.err


@pytest.mark.parametrize(
    "options",
    [
        ("--mode", "exact"),
        ("--mode", "one-sweep"),
        ("--drafts", 8),
        ("--draft-length", 9),
        ("--scores",),
    ],
)
def test_options_for_hosts_are_not_for_a_folder(
    cli: Cli, train: Train, options: tuple[object, ...]
) -> None:
    train()
    said = cli("generate", "m", "--length", 3, "--json", *options)  # or any byte at all is printed
    said.refuses(str(options[0]), "not for a model folder", "ADDRESS")
    written = cli("generate", "m", "--length", 3, "--json", "--mode", "autoregressive")
    assert json.loads(written.out)["length_bytes"] == 3


def test_the_bar_has_its_length_before_the_first_step(
    cli: Cli, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[float, float | None]] = []
    displays: list[node.console.terminal.TrainingDisplay] = []

    class Seen(node.console.terminal.TrainingDisplay):
        def __init__(self) -> None:
            super().__init__()
            displays.append(self)

    measure = node.local.training.honest_ce

    def measured(*arguments: Any) -> Any:
        (task,) = displays[0].bar.tasks if displays[0].bar is not None else ()
        shown.append((task.completed, task.total))
        return measure(*arguments)

    monkeypatch.setattr(node.console.terminal, "on_terminal", lambda: True)
    monkeypatch.setattr(node.local.jobs, "TrainingDisplay", Seen)
    monkeypatch.setattr(node.local.training, "honest_ce", measured)
    train()
    assert shown[0] == (0, 5)
