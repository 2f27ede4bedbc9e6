"""Terminal output: progress bars (plain lines in a log), errors, a model's bytes; and Ctrl-C.

Progress and errors go to standard error, results to standard output, so that a result can be piped.
Must not import torch; rich is imported only if there is a terminal to draw on.
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from node.console.amounts import duration_words, size_words
from node.console.progress import Progress
from protocol.errors import BlockswarmError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

PLAIN_LINE_EVERY_S = 5.0
CLEAR_REST = "\x1b[K"  # of the line


def show_error(error: BlockswarmError, default_hint: str = "") -> None:
    """Print one line for what happened and one for what to do."""
    say(f"error: {one_line(error.message)}")
    hint = error.hint or default_hint
    if hint:
        say(f"  try: {one_line(hint)}")


def say(line: str) -> None:
    """Print a line to standard error, above the live line if there is one."""
    if _live is not None:
        _live.above(line)
    else:
        print(line, file=sys.stderr, flush=True)


def one_line(text: str, collapse: bool = True) -> str:
    """The text on one line, without control characters: file names in it can hold anything."""
    text = " ".join(text.split()) if collapse else text
    return "".join(c if c.isprintable() else "�" for c in text)


def on_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class LiveLine:
    """A status line at the bottom of a terminal that is redrawn in place; `say` prints above it.

    Only one can be active. `draw` gets the available width and must not exceed it: a wrapped line
    cannot be erased. Lines printed above it may be longer.
    """

    def __init__(self, draw: Callable[[int], str]) -> None:
        self.draw = draw
        self._stream = sys.stderr
        self._lock = RLock()  # a signal handler or a thread may print in the middle of it

    def refresh(self) -> None:
        with self._lock:
            self._stream.write(f"\r{self._line()}{CLEAR_REST}")
            self._stream.flush()

    def above(self, line: str) -> None:
        with self._lock:
            self._stream.write(f"\r{CLEAR_REST}{line}\n{self._line()}{CLEAR_REST}")
            self._stream.flush()

    def _line(self) -> str:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return self.draw(max(10, (columns or 80) - 1))  # 0: the width is unknown

    def __enter__(self) -> LiveLine:
        global _live
        _live = self
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        global _live
        _live = None
        self._stream.write(f"\r{CLEAR_REST}")
        self._stream.flush()


_live: LiveLine | None = None


class _Display:
    """A progress bar on a terminal, or a line every few seconds in a log; begins with `show`."""

    def __init__(self) -> None:
        self.bar: Bar | None = None
        self.task: Any = None
        self.last_line_s = -PLAIN_LINE_EVERY_S

    def show(self, what: str, done: int, total: int, state: str) -> None:
        """Show this progress. `total` 0: not known."""
        if on_terminal():
            if self.bar is None:
                self.bar = _new_bar()
                self.task = self.bar.add_task(what, total=None, state="")
                self.bar.start()
            self.bar.update(
                self.task, description=what, completed=done, total=total or None, state=state
            )
            return
        now = time.monotonic()
        if now - self.last_line_s >= PLAIN_LINE_EVERY_S or done == total:
            self.last_line_s = now
            say(f"{what}  {state}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


class TrainingDisplay(_Display):
    """Shows the progress of `node.local.training`."""

    def __call__(self, progress: Progress) -> None:
        ce = "" if progress.valid_ce_nats is None else f"CE {progress.valid_ce_nats:.3f}  "
        over = progress.step == progress.steps
        left = "measuring the result" if over else f"{duration_words(progress.left_s)} left"
        rate = f"{size_words(progress.bytes_per_s)}/s"
        state = f"{ce}loss {progress.loss_nats:.3f}  {rate}  {left}"
        what = f"step {progress.step}/{progress.steps}"
        self.show(what, progress.step, progress.steps, state)


class DownloadDisplay(_Display):
    """Shows the progress of `node.data.download`, if something has to be downloaded."""

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None:
        of = f" of {size_words(total_bytes)}" if total_bytes else ""
        self.show(what, done_bytes, total_bytes, size_words(done_bytes) + of)


def _new_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(bar_width=24)
    return Bar(*columns, TextColumn("{task.fields[state]}"), console=Console(stderr=True))


class ByteWriter:
    """Streams a model's bytes to standard output: raw into a pipe, sanitised on a terminal.

    There, invalid UTF-8 and control characters, which could move the cursor or worse, are shown as
    a replacement character.
    """

    def __init__(self) -> None:
        self.raw = not sys.stdout.isatty()
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes, final: bool = False) -> None:
        if not self.raw:
            text = self.decoder.decode(data, final)
            text = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
            data = text.encode(sys.stdout.encoding or "utf-8", errors="replace")
        sys.stdout.flush()  # what was printed as text comes first
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        self.write(b"", final=True)
        self.write(b"\n")


class StopFlag:
    """Set by the first Ctrl-C, SIGTERM or SIGHUP; the second one ends the process at once."""

    def __init__(self) -> None:
        self.signal_number = 0

    def __call__(self) -> bool:
        return self.signal_number != 0

    @property
    def exit_code(self) -> int:
        """The exit code that shells report for a command ended by this signal."""
        return 128 + self.signal_number

    def handle(self, number: int, _: FrameType | None) -> None:
        if self.signal_number:
            raise KeyboardInterrupt
        self.signal_number = number


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the context. A child that is started in it never gets it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a flag that a loop checks between two steps."""
    flag = StopFlag()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if kept[number] is not signal.SIG_IGN:  # nohup sets this; keep it
            signal.signal(number, flag.handle)
    try:
        yield flag
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
