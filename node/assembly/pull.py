"""Pull the latest consensus of every block, check it, and compose the blocks into one model.

The last block gets the newest version that its replicas have signed; the others, if versions are
staggered, those that its worker read (`swarm.learning.coupling`), else their own newest. Replicas
may come and go meanwhile; a block without any can be left out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Protocol, TypeVar

from node.log.consensus import Consensus
from node.log.fetch import FetchError, LogFetcher, Peers, Quanta, RemoteLog
from node.log.follow import Follower, FollowSettings
from protocol.digests import weights_digest
from protocol.errors import BlockswarmError, UsageError, WireError
from protocol.identity import peer_text
from protocol.messages import Message, Purpose
from protocol.records import SignedRecord
from swarm.consensus.log import ConsensusLog
from swarm.consensus.updates import UpdateCodec
from swarm.learning.composition import ComposedModel
from swarm.learning.coupling import composed_versions
from swarm.learning.flat import Floats, initial_flat, load_flat
from swarm.learning.model import Block
from swarm.learning.worker import initial_block
from swarm.runfile import RunFile

M = TypeVar("M", bound=Message)

ATTEMPTS = 3
RETRY_S = 1.0  # then twice as long: restarting replicas are back within seconds
NAMED_PEERS = 4096  # in a whole manifest, to bound what strangers can add to it

Records = Callable[[int], Awaitable[Sequence[SignedRecord]]]
Say = Callable[[str], None]
OnBytes = Callable[[int, int], None]


class BlockMissing(BlockswarmError):
    """No replica of a block answers."""


class Unsigned(FetchError):
    """No replica has signed the head of the log that we were given."""


class Store(Protocol):
    """Persistent storage of pulled versions."""

    def load(self, block: int, size: int) -> tuple[ConsensusLog, Quanta] | None:
        """The stored version of a block, if it is intact and of this run."""

    def save(self, block: int, log: ConsensusLog, weights: Quanta) -> None:
        """Store a version, replacing the previous one."""


@dataclass(frozen=True)
class Assembled:
    """The model, and the version and facts of each block. Version v is the start of round v."""

    model: ComposedModel
    versions: list[int | None]
    facts: list[dict[str, Any]]

    @property
    def newest_round(self) -> int:
        return max(version for version in self.versions if version is not None) - 1

    @property
    def missing(self) -> list[int]:
        return [block for block, version in enumerate(self.versions) if version is None]


class CountedPeers:
    """`Peers` that reports received payload bytes to a progress display."""

    def __init__(self, peers: Peers, on_bytes: OnBytes) -> None:
        self.peers, self.on_bytes = peers, on_bytes

    async def ask(
        self,
        peer: str,
        request: Message,
        wanted: type[M],
        deadline_s: float,
        max_payload_bytes: int | None = None,
    ) -> tuple[M, bytes]:
        message, payload = await self.peers.ask(
            peer, request, wanted, deadline_s, max_payload_bytes
        )
        self.on_bytes(int(getattr(request, "block", -1)), len(payload))
        return message, payload


class BlockCopy(Follower):
    """A follower that accepts a version only if a replica has signed it, and knows the signers."""

    def __init__(
        self,
        settings: FollowSettings,
        first_weights: Floats,
        peers: Peers,
        donors: Callable[[int], Awaitable[Sequence[str]]],
    ) -> None:
        super().__init__(settings, first_weights, peers, donors)
        self._first = (self.log, self.consensus)
        self._heard: dict[str, RemoteLog] = {}
        self.signers: tuple[str, ...] = ()

    async def _ask_all(self, fetcher: LogFetcher, donors: Sequence[str]) -> dict[str, RemoteLog]:
        self._heard = await super()._ask_all(fetcher, donors)
        return self._heard

    def restore(self, log: ConsensusLog, weights: Quanta) -> None:
        """Go on from a stored version, if that is newer."""
        if weights_digest(weights) == log.head.weights and log.head.round > self.round:
            self.log = log
            codec, block = self.settings.codec, self.settings.block
            self.consensus = Consensus(weights, codec, block, light=True)

    async def bring(self, to_round: int, records: Sequence[SignedRecord]) -> None:
        """Move to the version of `to_round`. Raises `Unsigned` if no replica has signed it."""
        await self.advance(to_round)
        signers = self._signers(records)
        if not signers and self.round >= 0:
            self.log, self.consensus = self._first
            raise Unsigned(f"no replica of block {self.settings.block} has signed what we hold")
        self.signers = signers

    def _signers(self, records: Sequence[SignedRecord]) -> tuple[str, ...]:
        """The peers whose signed record names our head or an entry built on it.

        An entry's digest covers its parent, so signing a later entry signs ours too.
        """
        head = self.log.head.digest
        named = {head}
        for remote in self._heard.values():
            digests = [entry.digest for entry in remote.entries]
            if head in digests:
                named.update(digests[digests.index(head) :])
        return tuple(sorted(peer_text(s.peer_id) for s in records if s.record.consensus in named))


def signed_round(records: Sequence[SignedRecord]) -> int:
    """The round of the head that most replicas have signed; on a tie the newest one.

    Not simply the newest, since one stranger's record can claim any round. Replicas at the run's
    first weights have not caught up yet and are not counted.
    """
    moved = [s for s in records if s.record.head_round >= 0] or records
    support = Counter((s.record.head_round, s.record.consensus) for s in moved)
    (number, _), _ = max(support.items(), key=lambda item: (item[1], item[0][0], item[0][1]))
    return number


class Assembler:
    """Follows the logs of all blocks. `records` looks up the verified records of a block."""

    def __init__(
        self,
        run_file: RunFile,
        run_id: bytes,
        peers: Peers,
        records: Records,
        say: Say,
        store: Store | None = None,
    ) -> None:
        self.run_file, self.run, self.say, self.store = run_file, run_file.run, say, store
        self._look_up = records
        self._records: dict[int, Sequence[SignedRecord]] = {}
        self._stored: dict[int, bytes] = {}  # block -> the digest that the store has
        self.copies = [self._copy(run_id, peers, b) for b in range(self.run.model.blocks)]

    def _copy(self, run_id: bytes, peers: Peers, block: int) -> BlockCopy:
        exchange = self.run_file.exchange
        first = initial_flat(self.run, block)
        codec = UpdateCodec(self.run_file.codecs, len(first))
        settings = FollowSettings(run_id, block, codec, exchange.snapshot_every, Purpose.ASSEMBLY)
        return BlockCopy(settings, first, peers, self._donors)

    async def pull(self, leave_out: Sequence[int] = (), allow_missing: bool = False) -> Assembled:
        """Move every block to its wanted version and compose. Raises `BlockMissing`."""
        wanted = [b for b in range(len(self.copies)) if b not in leave_out]
        for block in leave_out:
            if not 0 <= block < len(self.copies):
                raise UsageError(
                    f"there is no block {block} to leave out",
                    f"the run's blocks are 0 to {len(self.copies) - 1}",
                )
        if not wanted:
            raise UsageError("every block is left out", "give fewer --without")
        await asyncio.gather(*(self._find(block) for block in wanted))
        present = [b for b in wanted if self._records[b] or self.copies[b].round >= 0]
        for block in wanted:
            if block not in present:
                self._miss(block, "none has a record", allow_missing)
        rounds = self._rounds(present)
        problems = await asyncio.gather(*(self._bring(b, rounds[b]) for b in present))
        for block, problem in zip(present, problems, strict=True):
            if problem is not None and self.copies[block].round < 0:
                self._miss(block, problem, allow_missing)
                rounds.pop(block)
            elif problem is not None:
                self.say(f"block {block}: {problem}; keeping round {self.copies[block].round}")
        return self._compose(set(rounds))

    def _miss(self, block: int, why: str, allowed: bool) -> None:
        if not allowed:
            raise BlockMissing(
                f"block {block} has no replica that answers ({why})",
                f"wait for one, or leave the block out with --without {block}",
            )
        self.say(f"block {block} has no replica that answers ({why}); leaving it out")

    def _rounds(self, present: Sequence[int]) -> dict[int, int]:
        """Block -> the round whose consensus is wanted."""
        if not present:
            raise BlockMissing("no block has a replica", "wait for a host, or ask the operator")
        newest = {b: self._newest(b) for b in present}
        if not (self.run.model.relays and self.run.training.staggered):
            return newest
        last = max(present)
        versions = composed_versions(last + 1, newest[last] + 1, staggered=True)
        return {b: versions[b] - 1 for b in present}

    def _newest(self, block: int) -> int:
        records = self._records[block]
        return max(signed_round(records) if records else -1, self.copies[block].round)

    async def _find(self, block: int) -> None:
        """Look up a block's replicas. A failed lookup counts as an empty one."""
        try:
            self._records[block] = await self._look_up(block)
        except (WireError, TimeoutError):
            self._records[block] = ()

    async def _donors(self, block: int) -> Sequence[str]:
        """The block's replicas, those behind the median round last. A higher round gives no
        priority: otherwise peers with false claims would be the only ones asked."""
        records = self._records[block]
        usual = median_low(s.record.head_round for s in records) if records else -1
        found = sorted(records, key=lambda s: s.record.head_round < usual)
        return [peer_text(signed.peer_id) for signed in found]

    async def _bring(self, block: int, to_round: int) -> str | None:
        """Move a block to `to_round`, with retries. Return None, or why it failed."""
        copy = self.copies[block]
        if self.store is not None and copy.round < 0:
            kept = self.store.load(block, len(copy.consensus.weights))
            if kept is not None and kept[0].head.round <= to_round:
                copy.restore(*kept)
                self._stored[block] = kept[0].head.digest
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_S * attempt)
                await self._find(block)
            try:
                await copy.bring(to_round, self._records[block])
            except (WireError, TimeoutError) as error:
                problem = str(error) or "no answer in time"
                continue
            self._keep(block)
            return None
        return problem

    def _keep(self, block: int) -> None:
        copy = self.copies[block]
        if self.store is not None and self._stored.get(block) != copy.log.head.digest:
            self.store.save(block, copy.log, copy.consensus.weights)
            self._stored[block] = copy.log.head.digest

    def _compose(self, present: set[int]) -> Assembled:
        blocks: list[Block | None] = []
        for index, copy in enumerate(self.copies):
            if index not in present:
                blocks.append(None)
                continue
            block = initial_block(self.run, index)
            load_flat(block, copy.weights())
            blocks.append(block.requires_grad_(False))
        versions = [c.round + 1 if b in present else None for b, c in enumerate(self.copies)]
        facts = [self._facts(b, c) for b, c in enumerate(self.copies) if b in present]
        return Assembled(ComposedModel(self.run, blocks), versions, facts)

    def _facts(self, block: int, copy: BlockCopy) -> dict[str, Any]:
        """A block's facts for the manifest. "contributors": peer -> rounds with its update in."""
        head, most = copy.log.head, max(8, NAMED_PEERS // len(self.copies))
        rounds = Counter(c.sender for e in copy.log.entries for c in e.contributions if c.scale > 0)
        return {
            "block": block,
            "round": head.round,
            "consensus": head.digest.hex(),
            "signers": list(copy.signers[:most]),
            "contributors": dict(rounds.most_common(most)),
            "contributors_total": len(rounds),
            "log_since_round": copy.log.entries[0].round,
            "parameters": len(copy.consensus.weights),
        }
