"""`blockswarm` in this process, as a person would type it: its exit code and what it printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from node.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def refuses(self, *words: str) -> None:
        """Two lines: what happened with its likely cause, what to type. And these words."""
        said = self.err.splitlines()
        assert self.code == 2, self
        assert "Traceback" not in self.err
        assert said[-2].startswith("error: ") and said[-1].startswith("  try: "), self.err
        for word in words:
            assert word in self.err, (word, self.err)


Cli = Callable[..., Result]


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["blockswarm", *map(str, arguments)])
    try:
        main()
    except SystemExit as error:
        return int(str(error.code))
    return 0


def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> Result:
    capsys.readouterr()  # what was printed before is not this command's
    code = exit_code(monkeypatch, *arguments)
    return Result(code, *capsys.readouterr())
