"""The node's side of its training process: start it, give it orders, notice when it dies.

Every order has a deadline, and a process that misses one is killed. Runs on the node's event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol
from weakref import finalize

import msgpack
import numpy as np

from node.trainer import spare_process
from node.trainer.process import (
    SharedWeights,
    TrainerSettings,
    lay_out,
    shared_bytes,
    shared_weights,
)
from protocol.errors import BlockswarmError
from swarm.consensus.fixed_point import Quanta, write_floats
from swarm.learning.coupling import followed_blocks
from swarm.learning.flat import Change, Floats, flat_size
from swarm.learning.worker import initial_block
from swarm.run import Run

START_DEADLINE_S = 120.0  # importing torch on a busy machine
STOP_S = 1.0  # a host leaves within 5 s in all
ORDER_DEADLINE_S = 120.0  # an order waits for the running step, and evaluation takes seconds


class TrainerError(BlockswarmError):
    """The training process refused, failed or died."""


OnProgress = Callable[[dict[str, Any]], None]
OnDeath = Callable[[], None]


class BlockTrainer(Protocol):
    """The interface of a block's trainer. `Trainer`, with a process of its own, implements it."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def begin_round(self, step: int, steps: int, rate_factor: float = 1.0) -> None: ...

    async def renew_copies(self, copies: Mapping[int, Quanta]) -> None: ...

    async def snapshot(self) -> Floats: ...

    def held(self) -> AbstractAsyncContextManager[Floats]: ...

    async def correct(self, changes: Sequence[Change]) -> None: ...

    async def replace(self, flat: Floats) -> None: ...

    async def evaluate(self, flat: Floats) -> float: ...

    async def pause(self, paused: bool) -> None: ...

    async def save(self, path: Path) -> None: ...

    async def load(self, path: Path) -> None: ...


class Trainer:
    """One training process. Calls `on_progress` with its progress, `on_death` if it dies."""

    def __init__(
        self,
        settings: TrainerSettings,
        on_progress: OnProgress,
        on_death: OnDeath,
    ) -> None:
        self.on_progress, self.on_death = on_progress, on_death
        run = Run.from_dict(settings.run)
        followed = followed_blocks(run.model, settings.block)
        sizes = {j: flat_size(initial_block(run, j)) for j in followed}
        own = flat_size(initial_block(run, settings.block))
        self._order_to_begin = {
            "settings": asdict(settings),
            "own_size": own,
            "copy_sizes": sizes,
        }
        # The descriptor stays open for as long as this object: the process may be restarted.
        self._memory_fd, memory = spare_process.anonymous_memory(shared_bytes(own, sizes))
        finalize(self, os.close, self._memory_fd)
        self.shared: SharedWeights = shared_weights(memory, own, sizes)
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._next_id = 0
        self._shared_lock = asyncio.Lock()  # `shared.own` serves one order at a time
        self._copies_lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._process, ours = started = spare_process.take()
        self._connection = ours
        self._ready = loop.create_future()
        loop.add_reader(ours.fileno(), self._on_readable)
        with suppress(OSError):  # it died: `_on_readable` notices that
            spare_process.give_order(started, self._order_to_begin, self._memory_fd)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                answer = await self._ready
        except TimeoutError:
            await self.stop()
            raise TrainerError("the training process did not start in time") from None
        if answer["op"] == "failed":
            await self.stop()
            raise TrainerError(answer["message"], answer["hint"])

    async def stop(self) -> None:
        """End the process: by an order, then by SIGKILL. Takes at most a few seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.is_alive():
                try:
                    async with asyncio.timeout(STOP_S):
                        await self._order({"op": "stop"})
                except (TimeoutError, TrainerError):
                    process.kill()  # checkpoints were saved before
            self._forget(TrainerError("the training process was stopped"))
            await asyncio.to_thread(process.join, STOP_S)
            if process.is_alive():
                process.kill()
                await asyncio.to_thread(process.join)
        except BaseException:
            # Cancelled: without this the process would train on, unreferenced, beside the next
            # one. It is not joined here: starting the next process reaps it.
            process.kill()
            self._forget(TrainerError("the training process was stopped"))
            raise
        process.close()

    # Orders.

    async def begin_round(self, step: int, steps: int, rate_factor: float = 1.0) -> None:
        """Allow `steps` training steps, the first of which is number `step` of the schedule."""
        order = {"op": "round", "step": step, "steps": steps, "rate_factor": rate_factor}
        await self._order(order)

    async def renew_copies(self, copies: Mapping[int, Quanta]) -> None:
        """Hand over newer versions of the other blocks that training reads."""
        async with self._copies_lock:
            for block, consensus in copies.items():
                await asyncio.to_thread(write_floats, consensus, self.shared.copies[block])
            if copies:
                await self._order({"op": "copies", "blocks": sorted(copies)})

    async def snapshot(self) -> Floats:
        """A copy of the running weights, taken between two steps."""
        async with self.held() as weights:
            return weights.copy()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Floats]:
        """Like `snapshot` without a copy: valid in the context, which blocks other such orders."""
        async with self._shared_lock:
            await self._order({"op": "snapshot"})
            yield self.shared.own

    async def correct(self, changes: Sequence[Change]) -> None:
        """Add changes to the running weights, all of them between the same two steps."""
        async with self._shared_lock:
            counts = await asyncio.to_thread(lay_out, changes, self.shared.own)
            await self._order({"op": "correct", "counts": counts})

    async def replace(self, flat: Floats) -> None:
        """Set the running weights and reset the optimizer's state."""
        async with self._shared_lock:
            await asyncio.to_thread(np.copyto, self.shared.own, flat)
            await self._order({"op": "replace"})

    async def evaluate(self, flat: Floats) -> float:
        """Honest CE of the block with these weights on the host's held-out bytes."""
        async with self._shared_lock:
            await asyncio.to_thread(np.copyto, self.shared.own, flat)
            answer = await self._order({"op": "evaluate"})
        return float(answer["ce_nats"])

    async def pause(self, paused: bool) -> None:
        await self._order({"op": "pause", "paused": paused})

    async def save(self, path: Path) -> None:
        await self._order({"op": "save", "path": str(path)})

    async def load(self, path: Path) -> None:
        await self._order({"op": "load", "path": str(path)})

    async def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        connection = self._connection
        if connection is None:
            raise TrainerError("the training process is not running")
        self._next_id += 1
        number = self._next_id
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            connection.send_bytes(msgpack.packb({**order, "id": number}))
            async with asyncio.timeout(ORDER_DEADLINE_S):
                answer = await future
        except (BrokenPipeError, ConnectionResetError) as error:
            raise TrainerError("the training process died") from error
        except TimeoutError:
            if self._process is not None and order["op"] != "stop":
                self._process.kill()  # `_on_readable` notices its end
            raise TrainerError(f"the training process did not answer {order['op']}") from None
        finally:
            self._waiting.pop(number, None)
        if answer.get("error"):
            raise TrainerError(f"{order['op']}: {answer['error']}")
        return answer

    # What it says.

    def _on_readable(self) -> None:
        assert self._connection is not None
        try:
            while self._connection.poll(0):
                self._hear(msgpack.unpackb(self._connection.recv_bytes()))
        except (EOFError, ConnectionResetError, OSError):
            expected = self._process is None
            self._forget(TrainerError("the training process died"))
            if not expected:
                self.on_death()

    def _hear(self, message: dict[str, Any]) -> None:
        if message["op"] == "progress":
            self.on_progress(message)
        elif message["op"] in ("ready", "failed"):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        else:
            future = self._waiting.get(message["id"])
            if future is not None and not future.done():
                future.set_result(message)

    def _forget(self, error: TrainerError) -> None:
        """Close our end of the pipe; all pending orders fail with `error`."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()
        for future in [*self._waiting.values(), *([self._ready] if self._ready else [])]:
            if not future.done():
                future.set_exception(error)
