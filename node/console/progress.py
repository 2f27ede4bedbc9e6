"""The progress of a local training run, as reported to a display; independent of torch and rich."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    `loss_nats` is the last block's training loss, smoothed; z is in its input, so it is no CE.
    `valid_ce_nats` is honest, on a little of the valid split, and None before it was measured.
    """

    step: int
    steps: int
    loss_nats: float
    bytes_per_s: float
    left_s: float
    valid_ce_nats: float | None


Report = Callable[[Progress], None]
StopAsked = Callable[[], bool]
