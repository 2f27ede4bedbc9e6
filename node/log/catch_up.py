"""Move from our head of a block's log to another head: fetch what is missing, replay and verify.

The move undoes our own steps back to the fork, or else starts from a donor's snapshot. Every
update, step and weight vector on the way is checked against the chain. Our present consensus is not
changed; the new one is returned when it is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from node.log.consensus import Consensus
from node.log.fetch import FetchError, LogFetcher
from protocol.log import Entry, LogError, Pin
from swarm.consensus.log import ConsensusLog


async def consensus_at(
    fetcher: LogFetcher,
    donors: Sequence[str],
    log: ConsensusLog,
    consensus: Consensus,
    entries: tuple[Entry, ...],
    pins: Sequence[Pin],
) -> Consensus:
    """The consensus at the end of `entries`, reached from `consensus` at the head of `log`.

    `pins` are the snapshots of these entries that the donors still have, the preferred one last.
    Raises `FetchError`; its `liars` include the donors if the chain itself proves wrong.
    """
    by_digest = {entry.digest: entry for entry in entries}
    plan = log.plan_move(entries, [by_digest[pin.entry] for pin in pins])
    other = consensus.copy()
    start = plan.snapshot or plan.fork or entries[0]
    if plan.snapshot is not None or not await asyncio.to_thread(other.roll_back, plan.rollback):
        if plan.snapshot is None and pins:  # we began at a snapshot ourselves: no steps to undo
            start = by_digest[pins[-1].entry]
        pin = next((pin for pin in pins if pin.entry == start.digest), None)
        if pin is None:
            raise FetchError("no donor has a snapshot to start from", fetcher.liars)
    else:
        pin = None
    try:
        if pin is not None:
            await _restart(other, fetcher, donors, start, pin)
        data = {}
        for entry in entries:
            if entry.round > start.round:
                data[entry.digest] = await fetcher.aggregate(donors, entry)
        await asyncio.to_thread(other.go_on, log.moved(entries), start, data)
    except LogError as error:  # the chain itself is wrong: all who offer it are to blame
        raise FetchError(error.message, [*fetcher.liars, *donors]) from error
    return other


async def _restart(
    other: Consensus, fetcher: LogFetcher, donors: Sequence[str], start: Entry, pin: Pin
) -> None:
    weights = await fetcher.snapshot(donors, pin, len(other.weights))
    try:
        other.restart(start, weights)
    except LogError as error:  # the chain may be right: only this donor named the wrong snapshot
        raise FetchError(error.message, [*fetcher.liars, pin.donor]) from error
