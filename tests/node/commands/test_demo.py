"""The demo leaves nothing behind, however it ends. Its whole run is `make demo`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node.commands.demo import _report
from node.commands.demo_swarm import demo_run, swarm_in, take_folder
from protocol.errors import UsageError
from swarm.run_template import emit, preset
from tests.support.processes import comes_true


def alive(folder: Path) -> list[str]:
    """Processes that work in the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder and (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_ctrl_c_counts_also_where_python_drops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a process is forked: the interrupt is raised in a hook of Python's, and ends there."""
    dropped: list[object] = []
    presses = [signal.SIGINT]

    def hook() -> None:  # as those of logging and others are run
        if presses:
            os.kill(os.getpid(), presses.pop())

    def fork() -> bool:
        subprocess.run(["true"], preexec_fn=lambda: None, check=True)
        return False

    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.exc_type))
    os.register_at_fork(after_in_parent=hook)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist's is another
    try:
        with swarm_in(tmp_path) as swarm, pytest.raises(KeyboardInterrupt):
            swarm.until(fork, "what never happens", 30.0)
        assert dropped == [KeyboardInterrupt]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["hosts", "model", "report.html", "run.toml"])
def test_what_no_demo_wrote_is_left_alone(tmp_path: Path, name: str) -> None:
    if name == "run.toml":  # as `init` writes it
        (tmp_path / name).write_bytes(emit(preset("tiny", "demo")))
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=name) as caught:
        take_folder(tmp_path)
    assert "-o" in caught.value.hint and (tmp_path / name).exists()


def test_a_folder_of_other_things_or_of_an_earlier_demo_will_do(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    take_folder(tmp_path)
    take_folder(tmp_path / "new" / "one")
    (tmp_path / "run.toml").write_bytes(emit(demo_run(40)))
    (tmp_path / "hosts").mkdir()
    (tmp_path / "model").mkdir()
    take_folder(tmp_path)


def test_the_report_is_utf_8_whatever_the_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.commands.report.load_run", lambda *_: None)
    monkeypatch.setattr("node.report.html.page", lambda _: "CE \u2192 \ud800")
    # What a locale may say where nobody says anything.
    monkeypatch.setattr("io.text_encoding", lambda given, *_: given or "ascii")
    assert _report(tmp_path).read_bytes().startswith("CE \u2192".encode())


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_all_processes_are_gone_when_the_demo_is_stopped(tmp_path: Path, how: int) -> None:
    folder = tmp_path.resolve()
    command = [sys.executable, "-m", "node.cli", "demo"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as demo:
        assert comes_true(lambda: len(alive(folder)) > 8, 120)  # hosts, and their p2pd
        demo.send_signal(how)
        demo.wait(60)
    assert comes_true(lambda: not alive(folder), 60)
