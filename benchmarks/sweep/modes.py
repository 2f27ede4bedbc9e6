"""The modes that the serving benchmark compares, how much of each, and what counts as trouble.

Knows nothing of hosts or of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PROMPT_BYTES = 64
TEMPERATURE = 1.0  # then the composed model's own distribution is what is aimed at


@dataclass(frozen=True)
class Mode:
    """A way to write an output."""

    name: str
    drafts: int = 8
    draft_length: int | None = None
    leave_out: tuple[int, ...] = ()
    joint: bool = False  # no drafts: all bytes come out of noise together
    per_byte: bool = False  # a traversal per byte: few outputs are enough, and more too slow

    def order(self, prompt: bytes, length: int, temperature: float, seed: int) -> dict[str, Any]:
        return {
            "prompt": prompt.hex(),
            "length": length,
            "temperature": temperature,
            "seed": seed,
            "drafts": self.drafts,
            "draft_length": self.draft_length,
            "leave_out": list(self.leave_out),
            "joint": self.joint,
        }


MODES = (
    Mode("one-sweep"),
    Mode("one-sweep, K=1", drafts=1),
    Mode("host 1 alone", drafts=1, leave_out=(1, 2)),
    Mode("denoise", drafts=1, joint=True),
    Mode("exact", draft_length=32),
    Mode("autoregressive", draft_length=0, per_byte=True),
)


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rtts_ms: tuple[int, ...] = (20, 50, 100, 200)
    length: int = 128  # bytes of an output
    timed: int = 8  # outputs of a mode at each RTT
    timed_per_byte: int = 2
    judged: int = 64  # outputs whose text is judged
    exact: int = 24  # outputs compared with local generation
    clients: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    waves: int = 2  # outputs of each client
    idle_s: float = 3.0  # before a mode's first output: TCP has forgotten how fast the line is


QUICK = Scale((100,), 32, 2, 1, 4, 2, (1, 4), 1, 0.0)


def troubles(outputs: Sequence[dict[str, Any]], mode: Mode, length: int) -> dict[str, int]:
    """How many there were, failed, were asked again, or lack a block that the mode has."""
    return {
        "outputs": len(outputs),
        "failures": sum(failed(output, length) for output in outputs),
        "retries": sum(output["retries"] for output in outputs),
        "without_a_block": sum(lacks(output, mode) for output in outputs),
    }


def failed(output: dict[str, Any], length: int) -> bool:
    return bool(output["error"]) or len(output["hex"]) != 2 * length


def lacks(output: dict[str, Any], mode: Mode) -> bool:
    return set(output["missing"]) != set(mode.leave_out)
