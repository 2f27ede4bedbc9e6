"""Counts of all bytes in and out, by purpose, block and peer, with totals that survive a restart.

Identities are free, so memory is bounded: beyond a number of named peers the smallest are folded
into "others", which changes no sum. What the DHT and libp2p add around frames cannot be counted
here; it is estimated, kept apart and labelled as an estimate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import BlockswarmError
from protocol.frames import Tally
from protocol.limits import BLOCK_NONE, LEDGER_CELLS_PER_PEER, LEDGER_PEERS
from protocol.messages import Purpose

OTHERS = "others"  # no peer's text: base58 has no "o" at the start of an id and a fixed length
_SLACK = 64  # peers beyond the limit before the next folding, so that newcomers can collect bytes
_FORMAT = 1
_STATE_MAX_BYTES = 64 * 1024 * 1024


class LedgerDamaged(BlockswarmError):
    """The ledger's file is not one that we wrote."""


@dataclass(frozen=True)
class Count:
    """Bytes and frames in both directions."""

    bytes_in: int = 0
    bytes_out: int = 0
    frames_in: int = 0
    frames_out: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
            self.frames_in + other.frames_in,
            self.frames_out + other.frames_out,
        )

    @property
    def bytes_total(self) -> int:
        return self.bytes_in + self.bytes_out

    def as_list(self) -> list[int]:
        return [self.bytes_in, self.bytes_out, self.frames_in, self.frames_out]


Cell = tuple[Purpose, int]  # purpose and block
_OVERFLOW: Cell = (Purpose.CONTROL, BLOCK_NONE)


class Ledger:
    """All counts of one node, in bounded memory. Counts enter through `book`."""

    def __init__(self, max_peers: int = LEDGER_PEERS) -> None:
        self._max_peers = max_peers
        self._cells: dict[str, dict[Cell, Count]] = {}
        self._peer_bytes: dict[str, int] = {}
        self._estimates: dict[str, Count] = {}

    def book(self, tally: Tally, peer: str, purpose: int, block: int = BLOCK_NONE) -> None:
        """Move a channel's tally into the ledger and reset it to 0.

        `peer` is the peer id's text. An unknown purpose, from a newer peer, counts as control.
        """
        count = Count(tally.bytes_in, tally.bytes_out, tally.frames_in, tally.frames_out)
        tally.bytes_in = tally.bytes_out = tally.frames_in = tally.frames_out = 0
        known = Purpose(purpose) if purpose in Purpose.__members__.values() else Purpose.CONTROL
        self._add(peer, (known, block), count)
        if len(self._cells) > self._max_peers + _SLACK:
            self._fold()

    def book_estimate(self, source: str, bytes_in: int, bytes_out: int) -> None:
        """Add bytes that were *not* counted but estimated. `source` is `dht` or `libp2p`."""
        before = self._estimates.get(source, Count())
        self._estimates[source] = before + Count(bytes_in, bytes_out)

    def _add(self, peer: str, cell: Cell, count: Count) -> None:
        cells = self._cells.setdefault(peer, {})
        if cell not in cells and len(cells) >= LEDGER_CELLS_PER_PEER:
            cell = _OVERFLOW  # a peer may name ever new blocks
        cells[cell] = cells.get(cell, Count()) + count
        self._peer_bytes[peer] = self._peer_bytes.get(peer, 0) + count.bytes_total

    def _fold(self) -> None:
        named = sorted((size, peer) for peer, size in self._peer_bytes.items() if peer != OTHERS)
        for _, peer in named[: len(named) - self._max_peers]:
            del self._peer_bytes[peer]
            for cell, count in self._cells.pop(peer).items():
                self._add(OTHERS, cell, count)

    # --- reading ----------------------------------------------------------------------------------

    def total(self) -> Count:
        return sum((c for cells in self._cells.values() for c in cells.values()), Count())

    def by_purpose(self) -> dict[Purpose, Count]:
        result: dict[Purpose, Count] = {}
        for cells in self._cells.values():
            for (purpose, _), count in cells.items():
                result[purpose] = result.get(purpose, Count()) + count
        return result

    def by_peer(self) -> dict[str, Count]:
        return {peer: sum(cells.values(), Count()) for peer, cells in self._cells.items()}

    def of_peer(self, peer: str) -> Mapping[Cell, Count]:
        return dict(self._cells.get(peer, {}))

    def estimates(self) -> dict[str, Count]:
        """Estimates by source. Never add them to measured bytes."""
        return dict(self._estimates)

    # --- surviving a restart --------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        rows = [
            [peer, purpose.name.lower(), block, *count.as_list()]
            for peer, cells in sorted(self._cells.items())
            for (purpose, block), count in sorted(cells.items())
        ]
        estimates = {name: count.as_list() for name, count in sorted(self._estimates.items())}
        state = {"format": _FORMAT, "counted": rows, "estimated": estimates}
        return json.dumps(state, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, max_peers: int = LEDGER_PEERS) -> Ledger:
        ledger = cls(max_peers)
        try:
            state = json.loads(data)
            if state["format"] != _FORMAT:
                raise ValueError(f"format {state['format']}")
            for peer, purpose, block, *numbers in state["counted"]:
                cell = (Purpose[str(purpose).upper()], int(block))
                ledger._add(str(peer), cell, _count(numbers))
            for name, numbers in state["estimated"].items():
                ledger._estimates[str(name)] = _count(numbers)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LedgerDamaged(f"the ledger cannot be read: {error}", "move it away") from error
        ledger._fold()
        return ledger

    @classmethod
    def load(cls, path: Path, max_peers: int = LEDGER_PEERS) -> Ledger:
        """The ledger in `path`, or an empty one if there is none."""
        try:
            with open(path, "rb") as file:
                data = file.read(_STATE_MAX_BYTES + 1)
        except FileNotFoundError:
            return cls(max_peers)
        if len(data) > _STATE_MAX_BYTES:
            raise LedgerDamaged(f"{path} is too large for a ledger", "move it away")
        return cls.from_bytes(data, max_peers)


def _count(numbers: Any) -> Count:
    if len(numbers) != 4 or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("counts must be four whole numbers")
    return Count(*numbers)
