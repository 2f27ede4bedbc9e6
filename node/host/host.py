"""A host in a run: its network, its budget, and the block that it works on.

Decides that a host leaves its block for one that is in need, and what it does when the budget of
the day is used up. The work on a block is `block_work`'s; which block, `block_choice`'s; what a
person sees, through the events, is the caller's.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from node.host.block_choice import UNLIMITED, BlockWatch, choose_block
from node.host.block_work import BlockWork, HostParts, Premises, live_parts
from node.host.budget import FILE as BUDGET_FILE
from node.host.budget import DailyBudget
from node.host.events import EventWriter
from node.host.live_line import HostView, LinePart, RunTimes, host_line
from node.host.settings import HostSettings
from node.host.state import HostState
from node.log.follow import Follower
from node.machine.atomic import StorageError
from node.machine.going_on import going_on
from node.machine.memory import keep_freed_memory
from node.network.peer_clock import PeerClock
from node.network.service import Status
from node.serving.trained import trained_server
from protocol.errors import UsageError, WireError
from protocol.identity import peer_text
from protocol.records import Role
from swarm.rounds.clock import round_at
from swarm.runfile import RunFile, parse, run_id

_log = logging.getLogger(__name__)

CLOCK_EVERY_ROUNDS = 8
CLOCK_EVERY_S = 120.0  # at least so often
LOOK_AT_BLOCKS_S = 5.0  # at most so often, and once a round


class Host:
    """One host. `run` takes part until it is cancelled."""

    def __init__(
        self, settings: HostSettings, say: Callable[[str], None], parts: HostParts | None = None
    ) -> None:
        self.settings, self.say = settings, say
        self.parts = parts or live_parts()
        self.run_file: RunFile = parse(settings.network.run_file)
        self.run_id = run_id(settings.network.run_file)
        if not self.run_file.started:
            raise UsageError("this run has not started", "start it with: blockswarm seed run.toml")
        # After the last round of training there is one more exchange, of what was learned in it.
        self.rules = replace(self.run_file.rounds.rules(), last=self.run_file.rounds.count)
        self.saver = self.parts.saver(settings.folder, self.run_id, self._note, say)
        network = replace(
            settings.network,
            up_bytes_per_s=settings.up_bytes_per_s,
            down_bytes_per_s=settings.down_bytes_per_s,
        )
        self.network = self.parts.network(network, self._status, say)
        self.me = peer_text(self.network.peer_id)
        self.events = self.parts.events(settings.folder, say)
        self.writer = EventWriter(self.me, self.network.ledger)
        self.served = (
            trained_server(self.network, self.run_id, self.run_file.run, settings.threads, say)
            if settings.serve
            else None
        )
        self.clock = PeerClock(self.network, self.run_id)
        self.budget = DailyBudget(settings.bytes_per_day)
        self.budget.load(settings.folder)
        self.network.kept.keep(BUDGET_FILE, self.budget.to_bytes)
        self.block = -1
        self.work: BlockWork | None = None
        self.paused = False
        self._sampling: asyncio.Task[None] | None = None

    def now_s(self) -> float:
        return self.clock.now_s()

    def line(self, view: HostView, times: RunTimes, now_s: float) -> list[LinePart]:
        """What the live line says."""
        view.block = self.block if self.block >= 0 else view.block
        loss_nats = self.writer.measured.loss_nats
        return host_line(view, times, self.settings.bytes_per_day, now_s, loss_nats)

    def _status(self) -> Status:
        if self.work is None:
            return Status(self._role(), 0, ())
        measured = self.writer.measured
        number = max(self.work.replica.state.round, 0)
        return Status(
            self._role(),
            number,
            (self.block,),
            measured.newest_ce_nats,
            measured.newest_own_ce_nats,
        )

    def _role(self) -> int:
        role = Role.REPLICA
        if self.settings.seed:
            role |= Role.SEED
        if self.served is not None:
            role |= Role.SERVER
        return int(role)

    # Life.

    async def run(self) -> None:
        saved = self.saver.load()
        # Whoever has been here before goes on alone if nobody answers.
        await self.network.start(alone_ok=saved is not None or self.settings.seed)
        try:
            if self.served is not None:
                self.served.start()
            await self.clock.sample()
            every_s = min(CLOCK_EVERY_ROUNDS * self.rules.period_s, CLOCK_EVERY_S)
            self._sampling = asyncio.create_task(self.clock.run(every_s))
            # What is imported by now (torch, hivemind) stays: a full collection that looks through
            # it all holds the event loop for 115 ms, in the middle of somebody's round.
            gc.freeze()
            keep_freed_memory()
            self.block = saved.block if saved else await self._choose_block()
            followers: Mapping[int, Follower] = {}
            while True:
                self.work = work = BlockWork(self._premises(), self.block, self.paused)
                target = await self._until_another_needs_us(work, saved, followers)
                followers, saved = work.copies.followers, None
                self._move(target)
        finally:
            if self._sampling is not None:
                self._sampling.cancel()
                await asyncio.gather(self._sampling, return_exceptions=True)
            if self.served is not None:
                await self.served.stop()
            self._note("left")
            try:
                await self.network.stop()
            except StorageError as error:
                self.say(error.message)

    def _premises(self) -> Premises:
        return Premises(
            self.settings,
            self.parts,
            self.run_file,
            self.run_id,
            self.rules,
            self.network,
            self.events,
            self.writer,
            self.saver,
            self.served,
            self._role(),
            self.now_s,
            self._note,
            self.say,
            self._round_began,
        )

    # Blocks.

    async def _choose_block(self) -> int:
        return await choose_block(
            self.network,
            self.run_file,
            self.settings.first_block if self.settings.block is None else self.settings.block,
            self.settings.memory_bytes,
            round_at(self.now_s(), self.rules.start_s, self.rules.period_s),
        )

    async def _until_another_needs_us(
        self, work: BlockWork, saved: HostState | None, followers: Mapping[int, Follower]
    ) -> int:
        """Work on a block until cancelled, or until another one is in need: which one."""
        working = asyncio.create_task(work.run(saved, followers))
        watching = asyncio.create_task(self._watch_blocks(work))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return watching.result()
        finally:
            watching.cancel()
            working.cancel()
            await asyncio.gather(watching, working, return_exceptions=True)

    async def _watch_blocks(self, work: BlockWork) -> int:
        """The block that needs us more than ours does, once there is one."""
        settings, replica = self.settings, work.replica
        watch = BlockWatch(
            self.network, self.run_file, settings.memory_bytes, rng=self.parts.numbers
        )
        while True:
            await asyncio.sleep(max(self.rules.period_s, LOOK_AT_BLOCKS_S))
            if settings.block is not None or work.ended or replica.muted:
                continue
            if watch.resting(work.rounds_here):
                continue
            left = self.budget.left_bytes(self.network.clock(), self._moved_bytes())
            with going_on(_log, "looking at the other blocks", WireError):
                target = await watch.look(
                    self.block,
                    replica.state.round,
                    work.rounds_here,
                    UNLIMITED if left is None else left,
                )
                if target is not None:
                    return target

    def _move(self, target: int) -> None:
        self.say(f"block {target} has too few hosts: moving there from block {self.block}")
        facts = {"from": str(self.block), "to": str(target)}
        detail = f"from block {self.block} to block {target}, which has too few hosts"
        self._note("moved_block", detail, facts)
        self.block, self.work = target, None
        self.writer.measured.forget_block()

    # While it works.

    def pause(self, paused: bool) -> None:
        """Stop training, or go on. The host stays a replica: it hears, votes and serves."""
        if self.work is None or paused == self.paused:
            return
        self.paused = paused
        self.work.pause(paused)
        self.say("training is paused" if paused else "training goes on")
        self._note("paused" if paused else "unpaused")

    def _round_began(self, number: int) -> None:
        self._mind_budget()
        if self._sampling is not None and self.rules.ended(number):
            self._sampling.cancel()

    def _moved_bytes(self) -> int:
        return self.network.ledger.total().bytes_total

    def _mind_budget(self) -> None:
        """Over the budget of the day: train on, exchange nothing until there is room again."""
        over = self.budget.over(self.network.clock(), self._moved_bytes())
        if self.work is None or self.work.replica.muted == over:
            return
        self.work.mute(over)
        if self.served is not None:
            self.served.mute(over)
        self.say(
            "over the budget of the day: training on, exchanging and serving nothing"
            if over
            else "within the budget again: exchanging"
        )
        self._note("over_budget" if over else "within_budget")

    def _note(self, what: str, detail: str = "", facts: Mapping[str, str] | None = None) -> None:
        self.events.write(self.writer.node(self.now_s(), what, detail, facts))
