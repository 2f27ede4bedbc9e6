"""What a person sees: progress that moves on a terminal and is plain lines elsewhere, and errors.

Progress and errors go to standard error, results to standard output, so that a result can be piped.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from node.local_training import Progress
from protocol.errors import BlockswarmError

PLAIN_LINE_EVERY_S = 5.0


def show_error(error: BlockswarmError) -> None:
    """One line for what happened, one for what to do."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  try: {error.hint}", file=sys.stderr)


def format_rate(bytes_per_s: float) -> str:
    for unit, size in (("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.1f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


class TrainingDisplay:
    """A progress bar on a terminal; a line every few seconds in a log."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True)
        self.bar: Bar | None = None
        self.last_line_s = 0.0
        if self.console.is_terminal and not quiet:
            self.bar = Bar(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("training", state="")

    def __call__(self, progress: Progress) -> None:
        ce = "" if progress.valid_ce_nats is None else f"CE {progress.valid_ce_nats:.3f}  "
        state = f"{ce}loss {progress.loss_nats:.3f}  {format_rate(progress.bytes_per_s)}"
        if self.bar is not None:
            self.bar.update(self.task, completed=progress.step, total=progress.steps, state=state)
            return
        now = time.monotonic()
        due = now - self.last_line_s >= PLAIN_LINE_EVERY_S or progress.step == progress.steps
        if due and not self.quiet:
            self.last_line_s = now
            print(f"step {progress.step}/{progress.steps}  {state}", file=sys.stderr, flush=True)

    def __enter__(self) -> TrainingDisplay:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


class StopFlag:
    """Set by the first Ctrl-C or SIGTERM; the second one ends the process at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def handle(self, number: int, _: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Turn Ctrl-C and SIGTERM into a question that a loop asks between two steps."""
    flag = StopFlag()
    kept = {s: signal.signal(s, flag.handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
