"""What a person sees."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from node.console.amounts import duration_words, size_words
from node.console.progress import Progress
from node.console.terminal import (
    ByteWriter,
    DownloadDisplay,
    TrainingDisplay,
    show_error,
    stop_on_signals,
)
from protocol.errors import UsageError


class Screen(io.TextIOWrapper):
    """A standard output that says it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        return True

    def shown(self) -> bytes:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue()


def test_an_error_is_one_line_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(UsageError("no file 'a\nb\x1b[2J'", "look again"))
    show_error(UsageError("odd"), "blockswarm --help")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "error: no file 'a b�[2J'\n  try: look again\nerror: odd\n  try: blockswarm --help\n"
    )


def test_numbers_for_people() -> None:
    sizes = ["0 bytes", "1.5 kB", "2.5 MB", "40.0 GB"]
    assert [size_words(size) for size in (0.3, 1500, 2.5e6, 4e10)] == sizes
    durations = {4.4: "4 s", 59.6: "1 min", 125: "2 min 5 s", 7384: "2 h 3 min", 1200: "20 min"}
    durations |= {86400: "24 h", 172800: "2 days", 280000: "3 days 5 h", -3.0: "-3 s"}
    assert {seconds: duration_words(seconds) for seconds in durations} == durations


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingDisplay() as display:
        for step in range(1, 101):
            display(Progress(step, 100, 2.0, 5000.0, 3.0, None if step < 100 else 1.5))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 1/100  loss 2.000  5.0 kB/s  3 s left",
        "step 100/100  CE 1.500  loss 2.000  5.0 kB/s  measuring the result",
    ]


def test_downloads_are_shown_only_if_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    with DownloadDisplay() as display:
        pass
    assert capsys.readouterr().err == ""
    with DownloadDisplay() as display:
        display("downloading x", 0, 4_000_000)
        display("downloading x", 4_000_000, 4_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "downloading x  0 bytes of 4.0 MB",
        "downloading x  4.0 MB of 4.0 MB",
    ]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with TrainingDisplay() as display, DownloadDisplay() as download:
        display(Progress(5, 10, 2.0, 5000.0, 3.0, 1.25))
    with DownloadDisplay() as download:
        download("downloading x", 1, 2)
    assert "5/10" in screen.shown().decode() and "CE 1.250" in screen.shown().decode()
    assert "downloading x" in screen.shown().decode()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_any_byte_can_be_written_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    screen = Screen(encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    writer = ByteWriter()
    for byte in [*"é".encode(), *bytes(range(256)), 0xC3]:  # the last one begins a character
        writer.write(bytes([byte]))
    writer.close()
    shown = screen.shown()
    assert b"\x1b" not in shown and b"\x07" not in shown and b"\r" not in shown
    assert b"ABC" in shown and shown.endswith(b"\n")
    if encoding == "utf-8":
        assert shown.decode().startswith("é�")


def test_bytes_into_a_pipe_are_left_alone(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    writer = ByteWriter()
    writer.write(bytes(range(256)))
    writer.close()
    assert capfdbinary.readouterr().out == bytes(range(256)) + b"\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_asks_and_second_one_ends(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop() and stop.exit_code == 128 + number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


# The live line, on a real pseudo-terminal.

SHOW = """
import sys
from node.host.live_line import fitted
from node.console.terminal import LiveLine, say
parts = [(9, "block 2"), (8, "round 41/120"), (7, "included"), (1, "x" * 200)]
line = LiveLine(lambda width: fitted(parts, width))
with line:
    line.refresh()
    say("a remark")
    say("y" * 100)
    line.refresh()
say("left")
"""


def on_a_terminal(program: str, columns: int) -> str:
    """What a program writes to a terminal of this width."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=side,
        stdout=side,
        stderr=side,
        env={**environment, "TERM": "xterm"},
    )
    os.close(side)
    written = b""
    with suppress(OSError):  # the end of a terminal is an error
        while data := os.read(main, 65536):
            written += data
    os.close(main)
    assert child.wait() == 0, written
    return written.decode()


def screen(written: str) -> list[str]:
    """The lines that stand there in the end, of a terminal that is wide enough."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]+", written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif token == "\x1b[K":
            rows[row] = rows[row][:column]
        else:
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + len(token) :]
            column += len(token)
    return rows


@pytest.mark.parametrize("columns", [30, 60, 300])
def test_remarks_stand_above_the_live_line(columns: int) -> None:
    written = on_a_terminal(SHOW, columns)
    lines = [part.split("\x1b")[0] for part in re.split(r"[\r\n]+", written)]
    shown = [line for line in lines if line.startswith("block 2")]
    assert len(shown) >= 4 and all(len(line) < columns for line in shown)  # never wraps
    assert screen(written) == ["a remark", "y" * 100, "left", ""]
