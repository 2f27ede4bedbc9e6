"""What happened in a simulated swarm, and whether it went well."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from protocol.ledger import Count
from swarm.events import LogEvent, RoundEvent, to_line

MAY_BE_APART = 3  # rounds in a row that an honest host may stand elsewhere than most of its block


@dataclass(frozen=True)
class Look:
    """Where the honest hosts stood at the end of a round: block -> host -> head of its log."""

    round: int
    heads: dict[int, dict[str, bytes]]

    @property
    def hosts(self) -> int:
        return sum(map(len, self.heads.values()))

    @property
    def apart(self) -> set[str]:
        """The hosts that do not stand where most of their block does."""
        found: set[str] = set()
        for heads in self.heads.values():
            (most, _), *_ = Counter(heads.values()).most_common(1)
            found |= {name for name, head in heads.items() if head != most}
        return found


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
    def by_host(self) -> list[tuple[float, str, RoundEvent]]:
        """The reports of rounds, with time and host."""
        return [(t, name, e) for t, name, e in self.events if isinstance(e, RoundEvent)]

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(event.outcome for _, _, event in self.by_host)

    def longest_apart(self, rounds: Collection[int]) -> tuple[int, str]:
        """The most rounds in a row, of these, in which a host stood apart; and which host."""
        longest, running = (0, ""), Counter[str]()
        for look in self.looks:
            apart = look.apart if look.round in rounds else set()
            running = Counter({name: running[name] + 1 for name in apart})
            longest = max([longest, *((count, name) for name, count in running.items())])
        return longest

    def troubles(self, calm_rounds: Collection[int]) -> list[str]:
        """What must not happen. `calm_rounds`: those in which all hosts can reach each other."""
        found = [f"a host fell over: {error}" for error in self.errors]
        count, name = self.longest_apart(calm_rounds)
        if count > MAY_BE_APART:
            found.append(f"{name} stood apart from its block for {count} rounds")
        last = self.looks[-1] if self.looks else None
        if last is not None and last.apart and last.round in calm_rounds:
            found.append(f"the run ended with {', '.join(sorted(last.apart))} apart")
        return found
