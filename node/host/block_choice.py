"""Which block a host works on: the one that was asked for, or the neediest that fits; when to move.

Reads the records of every block and asks `swarm.assignment`. A block is full at 16 hosts: more
would need groups, which the live node does not have yet; a person is told, not left out silently.

A record says the round that its owner was in, so whoever was killed counts for some rounds more and
no longer, though its record lives on; one that claims a round which has not begun is made up and
does not count. A block that nobody has is in greater need than one with too
few hosts: while there is one, a single host is enough for each block and the others may leave.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from node.console.amounts import size_words
from node.network.network import Network
from protocol.errors import UsageError, WireError
from protocol.identity import peer_text
from protocol.records import Record, Role
from swarm.assignment import (
    BlockView,
    HostLimits,
    MoveRules,
    first_choice,
    move,
    must_stay,
    needy_rounds_after,
)
from swarm.cost import worker_memory_bytes
from swarm.rounds.state import MAX_GROUP
from swarm.runfile import RunFile

FRESH_ROUNDS = 3  # a host not heard for longer is gone
AHEAD_ROUNDS = 1  # its clock may be a little ahead of ours
UNLIMITED = 1 << 60


async def choose_block(
    network: Network, run_file: RunFile, wanted: int | None, memory_bytes: int, number: int
) -> int:
    """The block to begin with in round `number`.

    Raises `UsageError` if there is no such block, none fits, or all are full.
    """
    count = run_file.run.model.blocks
    if wanted is not None and not 0 <= wanted < count:
        raise UsageError(
            f"there is no block {wanted}",
            f"choose one of 0 to {count - 1}, or leave --block away",
        )
    blocks = range(count) if wanted is None else (wanted,)
    seen = []
    for block in blocks:
        try:
            seen.append(await _look(network, run_file, block, number))
        except WireError:  # nobody answers for it: then it needs us
            seen.append(_seen(run_file, block, ()))
    places = [one.view for one in seen if one.view.replicas < MAX_GROUP]
    if not places:
        raise UsageError(
            f"every block that you may train has {MAX_GROUP} hosts already",
            "more are not part of this version; start another run",
        )
    if wanted is not None:
        return wanted
    limits = HostLimits(memory_bytes, UNLIMITED)
    chosen = first_choice(places, limits, random.Random(network.peer_id))
    if chosen is None:
        least = min(view.memory_bytes for view in places)
        raise UsageError(
            f"no block fits: the smallest worker needs {size_words(least)} of memory, "
            f"--max-memory allows {size_words(memory_bytes)}",
            "raise --max-memory, or join a smaller run",
        )
    return chosen


@dataclass(frozen=True)
class _Seen:
    """A block as its records show it, without ourselves."""

    view: BlockView
    others: tuple[str, ...]


async def hosts_of(network: Network, block: int, number: int) -> tuple[str, ...]:
    """Who else trains a block, as of round `number`. Raises `WireError` if it cannot be asked."""
    return tuple(
        peer_text(signed.peer_id)
        for signed in await network.replicas(block)
        if signed.peer_id != network.peer_id
        and signed.record.role & Role.REPLICA
        and credible(signed.record, number)
        and fresh(signed.record, number)
    )


def credible(record: Record, number: int) -> bool:
    """Whether an honest peer can say so in round `number`. Before the first all say 0."""
    return record.round <= max(number, 0) + AHEAD_ROUNDS


def fresh(record: Record, number: int) -> bool:
    """Whether its owner was there lately."""
    return record.round >= number - FRESH_ROUNDS


async def _look(network: Network, run_file: RunFile, block: int, number: int) -> _Seen:
    return _seen(run_file, block, await hosts_of(network, block, number))


def _seen(run_file: RunFile, block: int, others: tuple[str, ...]) -> _Seen:
    memory = worker_memory_bytes(run_file, block)
    download = 4 * run_file.parameters(block)
    return _Seen(BlockView(block, len(others), memory, download, 1), others)


class BlockWatch:
    """Looks at all blocks once in a while and says when this host should move to another one."""

    def __init__(
        self,
        network: Network,
        run_file: RunFile,
        memory_bytes: int,
        rules: MoveRules | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.network, self.run_file, self.memory_bytes = network, run_file, memory_bytes
        self.rules, self.rng = rules or MoveRules(), rng or random.Random()
        self._needy: dict[int, int] = {}

    def resting(self, rounds_here: int) -> bool:
        """Whether it is too early to look: it could not move, whatever it saw."""
        return rounds_here < self.rules.rest_rounds - self.rules.patience_rounds

    async def look(
        self, own: int, number: int, rounds_here: int, download_bytes: int
    ) -> int | None:
        """The block to move to now, or None. Raises `WireError`: then nothing is known."""
        blocks = range(self.run_file.run.model.blocks)
        seen = [await _look(self.network, self.run_file, block, number) for block in blocks]
        return self.decide(seen, own, rounds_here, download_bytes)

    def decide(
        self, seen: Sequence[_Seen], own: int, rounds_here: int, download_bytes: int
    ) -> int | None:
        lost = any(one.view.replicas == 0 and one.view.block != own for one in seen)
        minimum = 1 if lost else self.run_file.exchange.min_replicas
        views = [
            replace(one.view, minimum=minimum, replicas=one.view.replicas + (one.view.block == own))
            for one in seen
        ]
        self._needy = needy_rounds_after(self._needy, views)
        mates = next(one.others for one in seen if one.view.block == own)
        return move(
            own,
            views,
            HostLimits(self.memory_bytes, download_bytes),
            rounds_here,
            self._needy,
            self.rng,
            stays=must_stay(peer_text(self.network.peer_id), mates, minimum),
            rules=self.rules,
        )
