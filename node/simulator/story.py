"""What happened in a simulated swarm, and whether it went well."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.ledger import Count
from swarm.events import LogEvent, RoundEvent, to_line

MAY_DISAGREE = 3  # rounds in a row that honest hosts of a block may stand on different consensuses


@dataclass(frozen=True)
class Look:
    """The honest hosts at the end of a round: block -> the heads that they stand on."""

    round: int
    heads: dict[int, list[bytes]]

    @property
    def apart(self) -> list[int]:
        """Blocks whose hosts do not agree."""
        return [block for block, heads in self.heads.items() if len(set(heads)) > 1]


@dataclass
class Story:
    """Everything that was seen. Two runs of one scenario and seed have equal digests."""

    events: list[tuple[float, str, LogEvent]] = field(default_factory=list)  # time, host, event
    said: list[tuple[float, str, str]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    moved: dict[str, Count] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)  # of hosts that fell over

    @property
    def digest(self) -> str:
        told = hashlib.blake2b(digest_size=16)
        for time_s, host, event in self.events:
            told.update(f"{time_s:.6f} {host} {to_line(event)}\n".encode())
        return told.hexdigest()

    @property
    def rounds(self) -> list[RoundEvent]:
        return [event for _, _, event in self.events if isinstance(event, RoundEvent)]

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(event.outcome for event in self.rounds)

    @property
    def longest_apart(self) -> int:
        """The most rounds in a row in which some block's hosts did not agree."""
        longest, running = 0, Counter[int]()
        for look in self.looks:
            apart = set(look.apart)
            running = Counter({block: running[block] + 1 for block in apart})
            longest = max([longest, *running.values()])
        return longest

    def troubles(self, calm_rounds: Sequence[int]) -> list[str]:
        """What must not happen: `calm_rounds` are those in which nothing stands in the way."""
        found = [f"a host fell over: {error}" for error in self.errors]
        calm, in_a_row = set(calm_rounds), 0
        for look in self.looks:
            in_a_row = in_a_row + 1 if look.apart and look.round in calm else 0
            if in_a_row > MAY_DISAGREE:
                found.append(f"round {look.round}: block {look.apart[0]} does not agree")
                break
        if self.looks and self.looks[-1].apart and self.looks[-1].round in calm:
            found.append(f"block {self.looks[-1].apart[0]} ends with several consensuses")
        return found
