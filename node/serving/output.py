"""Write one output with a serving swarm: sweep after sweep, with retries, until it is complete.

After a failure it takes another route, rebuilds the caches, or leaves out a block that no host
serves; for busy hosts it waits. Which bytes are kept is `swarm.writing.writer`'s decision.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

import torch

from node.serving.client import Result, SweepClient, SweepTrouble
from protocol.errors import UsageError
from protocol.limits import SWEEP_BUDGET_MAX_S, SWEEP_ID_BYTES
from protocol.serving import Mode, Sweep, Trouble
from swarm.run import Run
from swarm.writing.denoise import require_denoising
from swarm.writing.generate import Sampling
from swarm.writing.route import Route
from swarm.writing.sweep import byte_scores
from swarm.writing.writer import Ask, SweepWriter, VerifiedWriter

ATTEMPTS = 6  # per sweep, each on a new route
PATIENCE_S = 120.0  # how long to wait for busy hosts
BUSY_AGAIN_S = 0.5
# How often in a row a sweep may fail at a block before we go on without that block.
_REFUSALS: dict[int, int] = {Trouble.NOBODY: 1, Trouble.NO_SESSION: 3}
# Whole drafts go in parts over links with high latency, to use them while the drafter still writes,
# and only with few sweeps under way: otherwise the hosts are busy anyway.
PARTS, PARTS_FROM_S, PARTS_FROM_BYTES, PARTS_UNDER_WAY = 4, 0.02, 64, 4
TRUSTING = 2  # after so many attempts an answer with a block left out is accepted


@dataclass(frozen=True)
class Order:
    """What to write, and how.

    `draft_length`: bytes drafted and verified per sweep; None sends whole drafts in one sweep.
    `joint`: no drafts; every block denoises all bytes of the output (the mode `denoise`).
    `patience_s`: how long one sweep waits for busy hosts.
    `without`: blocks that are left out even if hosts serve them.
    """

    prompt: bytes
    length: int
    sampling: Sampling
    drafts: int = 8
    draft_length: int | None = None
    patience_s: float = PATIENCE_S
    joint: bool = False
    without: tuple[int, ...] = ()


@dataclass
class Figures:
    """What an output cost, as the client sees it."""

    traversals: int = 0
    troubles: list[str] = field(default_factory=list)  # why sweeps were asked for again
    seconds: float = 0.0
    first_s: float = 0.0  # until the first bytes were there
    score_nats: float = 0.0  # log-probability of the output, under the sampling if there is one
    missing: tuple[int, ...] = ()
    path: tuple[bytes, ...] = ()

    @property
    def failures(self) -> int:
        return len(self.troubles)


def check_without(run: Run, without: Collection[int]) -> None:
    """Raises `UsageError` if there is no such block, or none is left."""
    blocks = range(run.model.blocks)
    for block in without:
        if block not in blocks:
            raise UsageError(f"there is no block {block}", f"choose one of 0 to {len(blocks) - 1}")
    if set(blocks) <= set(without):
        raise UsageError("no block is left to answer", "leave out fewer with --without")


class Output:
    """Write one output. `figures` are complete when `write` is through."""

    def __init__(self, client: SweepClient, order: Order) -> None:
        if order.joint:
            require_denoising(client.run)
        check_without(client.run, order.without)
        self.client, self.order, self.figures = client, order, Figures()
        self._left_out: set[int] = set(order.without)
        self._refusals: Counter[int] = Counter()  # block -> sweeps that nobody took there
        self._keep: dict[int, bytes] = {}  # block -> the peer that has the caches
        self._in_parts = True  # until a sweep has failed
        self._session = secrets.token_bytes(SWEEP_ID_BYTES)

    async def write(self) -> AsyncIterator[bytes]:
        """Yield the output in pieces, as their bytes are decided."""
        began_s = time.monotonic()
        whole = self.order.draft_length is None or self.order.joint
        pieces = self._whole() if whole else self._verified()
        async for piece in pieces:
            self.figures.first_s = self.figures.first_s or time.monotonic() - began_s
            self.figures.seconds = time.monotonic() - began_s
            yield piece

    async def _whole(self) -> AsyncIterator[bytes]:
        order, context = self.order, self.client.run.model.context
        writer = SweepWriter(order.prompt, order.length, context, order.sampling)
        while not writer.done:
            outcome = (await self._result(writer)).outcome
            assert outcome.scores is not None
            scores = torch.from_numpy(outcome.scores.copy())
            if order.joint:
                self.figures.score_nats += float(scores.sum())
                yield writer.add(outcome.drafts[0].tobytes())
                continue
            assert outcome.drafted is not None
            rows = [row.tobytes() for row in outcome.drafts]
            piece = writer.hear(rows, scores, torch.from_numpy(outcome.drafted.copy()))
            self.figures.score_nats += float(scores[rows.index(piece)].sum())
            yield piece

    async def _verified(self) -> AsyncIterator[bytes]:
        order, context = self.order, self.client.run.model.context
        draft_length = order.draft_length or 0
        writer = VerifiedWriter(order.prompt, order.length, context, draft_length, order.sampling)
        while not writer.done:
            outcome = (await self._result(writer)).outcome
            drafted = outcome.drafts[0].tolist()
            if outcome.best is not None and outcome.best_scores is not None:
                piece = writer.hear_greedy(drafted, outcome.best.tolist())
                self.figures.score_nats += float(outcome.best_scores[: len(piece)].sum())
            else:
                assert outcome.drafted is not None and outcome.log_probs is not None
                log_probs = torch.from_numpy(outcome.log_probs.copy())
                q = torch.from_numpy(outcome.drafted[0].copy())
                piece = writer.hear_sampled(drafted, q, log_probs)
                chosen = torch.tensor(list(piece))
                scores = byte_scores(log_probs[: len(piece)], chosen, order.sampling)
                self.figures.score_nats += float(scores.sum())
            yield piece

    # --- one sweep, until it comes back ----------------------------------------------------------

    async def _result(self, writer: SweepWriter | VerifiedWriter) -> Result:
        end_s = time.monotonic() + self.order.patience_s
        attempt = 0
        while attempt < ATTEMPTS:
            route = await self.client.route(self._left_out, self._keep)
            ask = writer.ask()
            try:
                result = await self.client.send(route, self._sweep(route, ask), ask.context)
            except SweepTrouble as error:
                if error.trouble == Trouble.BUSY and time.monotonic() > end_s:
                    raise
                self._around(error)
                if error.trouble == Trouble.BUSY:
                    await asyncio.sleep(BUSY_AGAIN_S)
                else:
                    attempt += 1
                if isinstance(writer, VerifiedWriter):
                    writer.restart()
                continue
            if result.missing and attempt < TRUSTING and await self._distrusts(route, result):
                attempt += 1
                if isinstance(writer, VerifiedWriter):
                    writer.restart()
                continue
            self._arrived(route, result)
            return result
        raise SweepTrouble(f"{ATTEMPTS} sweeps did not come back")

    async def _distrusts(self, route: Route, result: Result) -> bool:
        if not await self.client.distrust_gaps(route, result):
            return False
        self._around(SweepTrouble("a block was left out although its host answers"))
        return True

    def _sweep(self, route: Route, ask: Ask) -> Sweep:
        order, sampling = self.order, self.order.sampling
        verify = order.draft_length is not None and not order.joint
        whole = Mode.DENOISE if order.joint else Mode.ONE_SWEEP
        hop_s = self.client.hop_s(route)
        return Sweep(
            run=self.client.run_id,
            block=route.hops[0].block,
            sweep=secrets.token_bytes(SWEEP_ID_BYTES),
            mode=int(Mode.VERIFY if verify else whole),
            place=0,
            route=tuple(hop.pack() for hop in route.hops),
            context=len(ask.context),
            drafts=1 if verify or order.joint else order.drafts,
            length=ask.length,
            parts=self._parts(route, ask.length),
            start=ask.start,
            session=self._session if verify else b"",
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            seed=ask.seed,
            composed=route.temperature,
            # Enough for every host to time out once and be replaced once.
            budget_s=min(hop_s * (2 * len(route.hops) + 2), SWEEP_BUDGET_MAX_S),
            hop_s=hop_s,
        )

    def _parts(self, route: Route, length: int) -> int:
        if self.order.joint or self.order.draft_length is not None:
            return 1
        far = route.latency_s >= PARTS_FROM_S and len(route.hops) > 1
        calm = self.client.under_way < PARTS_UNDER_WAY
        return PARTS if self._in_parts and far and calm and length >= PARTS_FROM_BYTES else 1

    def _around(self, error: SweepTrouble) -> None:
        """After a failure: new caches, a new survey; leave out a block that keeps failing."""
        self._keep.clear()
        self._session = secrets.token_bytes(SWEEP_ID_BYTES)
        self._in_parts = False
        self.client.look_again()
        if error.trouble == Trouble.BUSY:
            self.client.warn(f"{error.message}; waiting")
            return
        self.figures.troubles.append(error.message)
        # A lost session is routine (a restart, newer weights, an evicted cache): not reported.
        if error.trouble != Trouble.NO_SESSION:
            self.client.say(f"a sweep failed ({error.message}); trying another way")
        most = _REFUSALS.get(error.trouble)
        if most is not None and error.block is not None:
            self._refusals[error.block] += 1
            if self._refusals[error.block] > most:
                self._leave_out(error.block)

    def _arrived(self, route: Route, result: Result) -> None:
        self.figures.traversals += 1
        self._refusals.clear()
        self.figures.path = result.path
        for block in result.missing:  # the caches were built without it: it stays out
            self._leave_out(block)
        present = [hop.block for hop in route.hops if hop.block not in result.missing]
        self._keep = dict(zip(present, result.path, strict=False))
        self.figures.missing = tuple(sorted({*route.missing, *self._left_out}))

    def _leave_out(self, block: int) -> None:
        self._left_out.add(block)
        self.client.warn(f"no host takes block {block}: going on without")
