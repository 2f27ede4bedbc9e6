"""The status of a run, from its replicas' signed records: coverage, agreement, late replicas.

`look` asks the network. The figures are replicas' own claims: a record is signed, but its signer
can be wrong, and a host that died is counted until its record expires.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from node.log.fetch import FetchError, LogFetcher, Peers
from protocol.errors import WireError
from protocol.identity import peer_text
from protocol.messages import Hello, HelloReply, Purpose
from protocol.records import Role, SignedRecord
from swarm.consensus.updates import UpdateCodec
from swarm.rounds.clock import round_at
from swarm.runfile import RunFile

SLACK_ROUNDS = 1  # a record of the previous round is normal just after an exchange has opened
ASKED_PER_BLOCK = 3
ASK_S = 5.0

Records = Callable[[int], Awaitable[Sequence[SignedRecord]]]


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica's record. `behind_rounds` is relative to the run's clock."""

    peer: str
    seed: bool
    round: int
    consensus: str
    consensus_round: int
    agrees: bool
    behind_rounds: int
    update_bytes: int
    expires_in_s: float
    ce_nats: float | None = None  # of the consensus, as it measured; None: unknown or not asked
    own_ce_nats: float | None = None  # of its running weights, likewise

    @property
    def live(self) -> bool:
        return self.behind_rounds <= SLACK_ROUNDS


@dataclass(frozen=True)
class LastRound:
    """The newest entry of a block's log, as given by one replica."""

    round: int
    included: tuple[str, ...]
    left_out: tuple[str, ...]
    absent: tuple[str, ...] = ()  # live replicas whose update is not in it: late, new or silent


@dataclass(frozen=True)
class BlockStatus:
    """A block: the head that most live replicas share, and its replicas."""

    block: int
    consensus: str
    consensus_round: int
    agree: int
    needed: int
    replicas: tuple[ReplicaStatus, ...]
    last: LastRound | None = None

    @property
    def ce_nats(self) -> float | None:
        """The consensus' CE: the median of its replicas', as each has other bytes and may lie."""
        return _median([r.ce_nats for r in self.replicas])

    @property
    def own_ce_nats(self) -> float | None:
        """The median CE of its replicas' running weights."""
        return _median([r.own_ce_nats for r in self.replicas])

    @property
    def live(self) -> int:
        return sum(replica.live for replica in self.replicas)

    @property
    def warnings(self) -> list[str]:
        found = []
        if not self.live:
            found.append(f"block {self.block} has no live replica")
        elif self.live < self.needed:
            found.append(
                f"block {self.block} has {self.live} live replica{'s' * (self.live != 1)}, "
                f"wanted are {self.needed}"
            )
        apart = sum(r.live and not r.agrees and self._same_round(r) for r in self.replicas)
        if apart:
            found.append(
                f"block {self.block}: {apart} of {self.live} live replicas are on another branch"
            )
        return found

    def _same_round(self, replica: ReplicaStatus) -> bool:
        return replica.consensus_round == self.consensus_round


@dataclass(frozen=True)
class RunStatus:
    """The status of a whole run at one moment."""

    run: str
    name: str
    round: int
    rounds: int
    blocks: tuple[BlockStatus, ...]

    @property
    def warnings(self) -> list[str]:
        return [warning for block in self.blocks for warning in block.warnings]

    def facts(self) -> dict[str, Any]:
        """For `--json`."""
        blocks = []
        for block in self.blocks:
            row = asdict(block)
            row["replicas"] = [
                {**one, "live": r.live}
                for one, r in zip(row["replicas"], block.replicas, strict=True)
            ]
            behind = [r.peer for r in block.replicas if not r.live]
            ce = {"ce_nats": block.ce_nats, "own_ce_nats": block.own_ce_nats}
            blocks.append({**row, "live": block.live, "behind": behind, **ce})
        peers = {replica.peer for block in self.blocks for replica in block.replicas}
        return {
            "run": self.run,
            "name": self.name,
            "round": self.round,
            "rounds": self.rounds,
            "peers": len(peers),
            "live": sum(block.live for block in self.blocks),
            "update_bytes": sum(r.update_bytes for b in self.blocks for r in b.replicas),
            "blocks": blocks,
            "warnings": self.warnings,
        }


def block_status(
    block: int, records: Sequence[SignedRecord], current_round: int, needed: int, now_s: float
) -> BlockStatus:
    """The status of one block from its records."""
    # The head that most live replicas share; on a tie the newer. Late ones count if none is live.
    live = [s for s in records if current_round - s.record.round <= SLACK_ROUNDS]
    support = Counter((s.record.head_round, s.record.consensus) for s in live or records)
    head_round, head = max(support, key=lambda h: (support[h], h), default=(-1, b""))
    replicas = [
        ReplicaStatus(
            peer=peer_text(signed.peer_id),
            seed=bool(signed.record.role & Role.SEED),
            round=signed.record.round,
            consensus=signed.record.consensus.hex(),
            consensus_round=signed.record.head_round,
            agrees=signed.record.consensus == head,
            behind_rounds=max(0, current_round - signed.record.round),
            update_bytes=signed.record.update_bytes,
            expires_in_s=round(signed.expiration_s - now_s, 1),
        )
        for signed in sorted(records, key=lambda s: (-s.record.round, s.peer_id))
    ]
    agree = sum(replica.agrees for replica in replicas)
    return BlockStatus(block, head.hex(), head_round, agree, needed, tuple(replicas))


async def look(
    run_file: RunFile,
    run_id: bytes,
    records: Records,
    peers: Peers,
    now_s: float,
    needed: int | None = None,
) -> RunStatus:
    """Look up all blocks; ask replicas of each for its last round and its CE.

    `needed`: with fewer live replicas than this a block gets a warning; None: the run's minimum.
    """
    rounds, exchange = run_file.rounds, run_file.exchange
    current = max(0, round_at(now_s, rounds.start_s, rounds.period_s))

    async def one(block: int) -> BlockStatus:
        try:
            found = await records(block)
        except (WireError, TimeoutError):
            found = ()
        wanted = exchange.min_replicas if needed is None else needed
        status = block_status(block, found, current, wanted, now_s)
        codec = UpdateCodec(run_file.codecs, run_file.parameters(block))
        fetcher = LogFetcher(peers, run_id, block, codec, Purpose.CONTROL)
        last, replicas = await asyncio.gather(
            _last_round(fetcher, status), _with_ce(peers, run_id, status)
        )
        return replace(status, last=last, replicas=replicas)

    blocks = await asyncio.gather(*(one(b) for b in range(run_file.run.model.blocks)))
    return RunStatus(run_id.hex(), run_file.name, current, rounds.count, tuple(blocks))


async def _last_round(fetcher: LogFetcher, status: BlockStatus) -> LastRound | None:
    """The newest entry, from a replica that shares the head: few entries have to be sent."""
    donors = [r.peer for r in status.replicas if r.agrees and r.live][:ASKED_PER_BLOCK]
    try:
        log = await fetcher.log(donors, bytes.fromhex(status.consensus), None)
    except FetchError:
        return None
    entry = log.entries[-1]
    senders = {c.sender for c in entry.contributions}
    return LastRound(
        entry.round,
        tuple(c.sender for c in entry.contributions if c.scale > 0),
        tuple(c.sender for c in entry.contributions if c.scale == 0),
        tuple(r.peer for r in status.replicas if r.live and r.peer not in senders),
    )


async def _with_ce(peers: Peers, run_id: bytes, status: BlockStatus) -> tuple[ReplicaStatus, ...]:
    """The replicas; the first live ones are asked for their CE."""
    asked = [r.peer for r in status.replicas if r.live][:ASKED_PER_BLOCK]

    async def ask(peer: str) -> HelloReply | None:
        try:
            reply, _ = await peers.ask(peer, Hello(run=run_id), HelloReply, ASK_S)
        except WireError:
            return None
        return reply

    said = dict(zip(asked, await asyncio.gather(*map(ask, asked)), strict=True))
    return tuple(
        replace(r, ce_nats=reply.ce_nats or None, own_ce_nats=reply.own_ce_nats or None)
        if (reply := said.get(r.peer)) is not None
        else r
        for r in status.replicas
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
