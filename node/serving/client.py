"""The client of a swarm that serves: finds hosts, chooses routes, sends sweeps, takes results.

Hosts of failed sweeps get penalties that move them back in the order. A report by one host is not
proof, so both the reporter and the blamed host get one. What is asked next is
`swarm.writing.writer`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from node.network.network import Network
from node.network.service import Reply
from node.serving.handover import Crowded, Handover, NoHost, NoSession
from protocol.errors import BlockswarmError, WireError
from protocol.frames import Busy, Refused
from protocol.limits import SWEEP_HOP_MAX_S
from protocol.messages import ErrorCode
from protocol.parcel import Garbage, Outcome, outcome_bytes, unpack_outcome
from protocol.records import Role
from protocol.serving import (
    ServingReply,
    ServingRequest,
    Sweep,
    SweepFailed,
    SweepResult,
    SweepTaken,
    Trouble,
)
from swarm.run import Run
from swarm.writing.route import Offer, Route, choose_route

ASK_S, ASK_AGAIN_S = 5.0, 0.5
SURVEY_EVERY_S = 15.0
OLD_S = 60.0  # offers older than this are not used: a new survey comes first
SURVEYS, SURVEY_AGAIN_S = 3, 0.5  # attempts before we believe that there is no host
HOP_MIN_S = 2.0  # a host on a busy machine is not a dead one
HOSTS_ASKED = 8  # of each block
BLAME, SUSPICION = 2.0, 1.0
# The reporter's own penalty, since its report may be a lie.
_SUSPICIONS: dict[int, float] = {Trouble.GARBAGE: SUSPICION, Trouble.BUSY: SUSPICION / 4}


class NobodyServes(BlockswarmError):
    """No host of the run serves any block."""


class SweepTrouble(WireError):
    """A sweep failed or did not come back."""

    def __init__(self, message: str, trouble: int = 0, block: int | None = None) -> None:
        super().__init__(message)
        self.trouble, self.block = trouble, block


@dataclass(frozen=True)
class Result:
    outcome: Outcome
    path: tuple[bytes, ...]
    missing: tuple[int, ...]


@dataclass
class _Pending:
    sweep: Sweep
    peers: frozenset[bytes]
    result: asyncio.Future[Result]


class SweepClient:
    """A client on a network that the caller owns. `close` it when done."""

    def __init__(
        self,
        network: Network,
        run_id: bytes,
        run: Run,
        say: Callable[[str], None] = lambda line: None,
        hop_min_s: float = HOP_MIN_S,
    ) -> None:
        self.network, self.run_id, self.run, self.say = network, run_id, run, say
        self.hop_min_s = hop_min_s
        self.offers: list[Offer] = []
        self.penalties: dict[bytes, float] = defaultdict(float)
        self.handover = Handover(network)
        self._surveyed_s = -OLD_S
        self._refreshing: asyncio.Task[None] | None = None
        self._silent: set[bytes] = set()  # peers that did not answer the last survey
        self._surveying = asyncio.Lock()
        self._pending: dict[bytes, _Pending] = {}
        self._warned: set[str] = set()
        network.service.take(SweepResult, self._admit, self._take)
        network.serve(SweepFailed, self._failed)

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await self.handover.close()

    # --- who serves -----------------------------------------------------------------------------

    async def survey(self) -> None:
        """Ask all serving hosts for their versions and load, and measure their latency.

        If none answers we may be slow ourselves: try again. A host that is silent for one survey
        keeps its old offer; if it is really gone, sweeps find another way.
        """
        for attempt in range(SURVEYS):
            if attempt:
                await asyncio.sleep(SURVEY_AGAIN_S)
            peers = await self._serving_peers()
            asked = await asyncio.gather(*(self._ask(peer) for peer in peers))
            self._surveyed_s = time.monotonic()
            if any(asked):
                break
        answered = [offer for offer in asked if offer is not None]
        left_out = self._silent | {offer.peer for offer in answered}
        believed = [offer for offer in self.offers if offer.peer not in left_out]
        self.offers = [*answered, *believed]
        self._silent = {offer.peer for offer in believed}

    async def _serving_peers(self) -> set[bytes]:
        blocks = range(self.run.model.blocks)
        found = await asyncio.gather(
            *(self.network.replicas(block) for block in blocks), return_exceptions=True
        )
        peers: set[bytes] = set()
        for records in found:
            if isinstance(records, list):
                serving = [s.peer_id for s in records if s.record.role & Role.SERVER]
                peers.update(serving[:HOSTS_ASKED])
        return peers - {self.network.peer_id}

    async def _ask(self, peer: bytes) -> Offer | None:
        """One host's offer, or None. A busy host is asked again until the timeout."""
        end_s = time.monotonic() + ASK_S
        while (left_s := end_s - time.monotonic()) > 0:
            began_s = time.monotonic()
            try:
                answer = await self.network.request(
                    peer, ServingRequest(run=self.run_id), ServingReply, deadline_s=left_s
                )
                said = answer.message
                latency_s = time.monotonic() - began_s
                return Offer(
                    peer,
                    tuple(said.offered()),
                    latency_s,
                    said.waiting,
                    said.usual_s,
                    said.weights,
                    said.temperature,
                )
            except Busy as busy:
                await asyncio.sleep(min(busy.retry_after_s, ASK_AGAIN_S, left_s))
            except WireError:
                return None
        return None

    async def route(self, leave_out: Collection[int], first: Mapping[int, bytes]) -> Route:
        """The route to take now. `first`: for some blocks a peer to keep, as it has the caches."""
        async with self._surveying:  # concurrent outputs share one survey
            age_s = time.monotonic() - self._surveyed_s
            if age_s > OLD_S or not self.offers:
                await self.survey()
                age_s = 0.0
        if age_s > SURVEY_EVERY_S and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self.survey())  # for later routes
        route = choose_route(self.run, self.offers, self.penalties, leave_out, first)
        if route is None:
            raise NobodyServes(
                "no host of this run serves a block",
                "start one: blockswarm serve ADDRESS --block 0",
            )
        gone = tuple(block for block in route.missing if block not in leave_out)
        if gone:
            self.warn(f"no host serves block {_listed(gone)}: going on without")
        return route

    async def distrust_gaps(self, route: Route, result: Result) -> bool:
        """Whether a block was left out although its host answers us; penalise the hosts involved.

        Otherwise a lying host could claim that all others are absent and answer alone.
        """
        gaps = [hop for hop in route.hops if hop.block in result.missing]
        asked = await asyncio.gather(*(self._ask(peer) for hop in gaps for peer in hop.peers))
        if not any(asked):
            return False
        self.penalties[result.path[-1]] += SUSPICION
        for offer in asked:
            if offer is not None:
                self.penalties[offer.peer] += SUSPICION / 2
        return True

    def hop_s(self, route: Route) -> float:
        """The timeout of one hop: several times the expected time of the route's slowest host."""
        return min(max(self.hop_min_s, 4.0 * route.hop_s), SWEEP_HOP_MAX_S)

    def look_again(self) -> None:
        """Mark the offers as outdated, so that the next route starts with a survey."""
        self._surveyed_s = -OLD_S

    @property
    def under_way(self) -> int:
        """Sweeps that have not come back yet."""
        return len(self._pending)

    def warn(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            self.say(line)

    # --- one sweep ------------------------------------------------------------------------------

    async def send(self, route: Route, sweep: Sweep, context: bytes) -> Result:
        """Send a sweep along its route and wait for its result."""
        loop = asyncio.get_running_loop()
        pending = _Pending(sweep, route.peers, loop.create_future())
        self._pending[sweep.sweep] = pending
        end_s = time.monotonic() + sweep.budget_s
        first = asyncio.create_task(self.handover.to_any(route.hops[0], sweep, context, end_s))
        try:
            async with asyncio.timeout(sweep.budget_s):
                both: set[asyncio.Future[Any]] = {first, pending.result}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not pending.result.done():
                    first.result()  # raises if nobody took it
                return await pending.result
        except TimeoutError:
            for hop in route.hops:  # unknown who lost it: prefer other hosts next time
                self.penalties[hop.peers[0]] += SUSPICION / 2
            raise SweepTrouble("the sweep did not come back in time") from None
        except Crowded as error:
            raise SweepTrouble(str(error), Trouble.BUSY, route.hops[0].block) from error
        except NoHost as error:
            raise SweepTrouble(str(error), Trouble.NOBODY, route.hops[0].block) from error
        except NoSession as error:
            raise SweepTrouble(str(error), Trouble.NO_SESSION, route.hops[0].block) from error
        finally:
            del self._pending[sweep.sweep]
            await _let_go(first, pending.result)

    def _admit(
        self, message: SweepResult, size_bytes: int, caller: bytes
    ) -> contextlib.AbstractContextManager[None]:
        pending = self._pending.get(message.sweep)
        if pending is None or caller not in pending.peers:
            raise Refused(ErrorCode.NOT_FOUND, "nobody waits for this")
        if size_bytes != outcome_bytes(pending.sweep):
            self._set_trouble(pending, caller, "a result of another size")
            raise Refused(ErrorCode.NOT_ALLOWED, "a result of another size")
        return contextlib.nullcontext()

    async def _take(self, message: SweepResult, payload: bytes, caller: bytes) -> Reply:
        pending = self._pending.get(message.sweep)
        if pending is not None and not pending.result.done():
            try:
                outcome = unpack_outcome(pending.sweep, payload)
            except Garbage as garbage:
                self._set_trouble(pending, caller, str(garbage))
                raise
            pending.result.set_result(Result(outcome, message.path, message.missing))
        return Reply(SweepTaken())

    def _set_trouble(self, pending: _Pending, caller: bytes, reason: str) -> None:
        self.penalties[caller] += BLAME
        if not pending.result.done():
            pending.result.set_exception(SweepTrouble(reason, Trouble.GARBAGE))

    async def _failed(self, message: SweepFailed, caller: bytes) -> Reply:
        pending = self._pending.get(message.sweep)
        if pending is not None and caller in pending.peers and not pending.result.done():
            self.penalties[caller] += _SUSPICIONS.get(message.trouble, 0.0)
            if message.blamed in pending.peers:
                self.penalties[message.blamed] += BLAME
            error = SweepTrouble(message.reason, message.trouble, message.block)
            pending.result.set_exception(error)
        return Reply(SweepTaken())


async def _let_go(handing: asyncio.Task[bytes], result: asyncio.Future[Result]) -> None:
    """Cancel both, as the sweep is over. The first host may still be handing it on."""
    handing.cancel()
    result.cancel()
    await asyncio.gather(handing, result, return_exceptions=True)


def _listed(blocks: tuple[int, ...]) -> str:
    return ", ".join(map(str, blocks))
