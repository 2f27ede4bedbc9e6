"""What a person decides about a host, as options become it. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from node.host.block_choice import UNLIMITED
from node.network.network import NetworkSettings


@dataclass(frozen=True)
class HostSettings:
    """The options of `join` and `seed`."""

    network: NetworkSettings
    folder: Path
    data_spec: str | None = None  # None: what the run says
    block: int | None = None  # None: the neediest one, and another if that falls in need
    first_block: int | None = None  # to begin with; unlike `block` it may be left for another
    device: str = "auto"
    threads: int | None = None
    memory_bytes: int = UNLIMITED
    seed: bool = False  # announce ourselves as a peer to join through
    bytes_per_day: int | None = None  # both ways; beyond it the host trains on and moves no bulk
    up_bytes_per_s: float | None = None  # None: no limit
    down_bytes_per_s: float | None = None
    serve: bool = True  # answer sweeps with the block that is trained
