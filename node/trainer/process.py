"""The training process: it trains one block, apart from the node process with its network.

A small model holds Python's lock for most of a step; in one process with the network it would stall
the event loop, and peers would take the host for dead. Weights cross in shared memory, orders and
answers as msgpack over a pipe. Orders are carried out between two steps, so that weights are never
read or changed in the middle of one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from node.data.corpus import Corpus, load_corpus
from node.data.windows import WindowStream, stream_seed
from node.local.training import check_leak, held_out_batches
from node.machine.device import autocast_dtype, choose_device
from node.machine.memory import keep_freed_memory
from node.machine.tensor_file import read_tensors, write_tensors
from protocol.errors import BlockswarmError, DataError
from swarm.consensus.fixed_point import Halves
from swarm.learning.composition import ComposedModel
from swarm.learning.coupling import followed_blocks
from swarm.learning.evaluate import honest_ce, nll_sum
from swarm.learning.flat import Change, Floats, add_flat_at, flat_weights, load_flat
from swarm.learning.model import Block
from swarm.learning.moving_copy import MovingCopy, frozen_copy
from swarm.learning.worker import BlockWorker, initial_block, relayed_hidden
from swarm.run import Run

IDLE_POLL_S = 0.2
PROGRESS_EVERY_S = 0.5
HELD_OUT_BYTES = 8192


@dataclass(frozen=True)
class TrainerSettings:
    """What a training process gets at its start."""

    run: dict[str, Any]
    block: int
    data_spec: str
    stream: str  # names this host's stream of windows, so that no two hosts train on the same
    device: str = "auto"
    threads: int | None = None
    data_sha256: str = ""  # what the corpus must be; "": any


@dataclass(frozen=True)
class SharedWeights:
    """Vectors in memory that both processes share.

    `own` holds the weights of the current order, one order at a time: a snapshot of the running
    weights, corrections to add, or weights to set or evaluate. `copies` are the other blocks that
    this one reads, in half precision (see `swarm.learning.moving_copy`).
    """

    own: Floats
    copies: dict[int, Halves]


def shared_bytes(own_size: int, copy_sizes: dict[int, int]) -> int:
    return 4 * own_size + 2 * sum(copy_sizes.values())


def shared_weights(memory: Any, own_size: int, copy_sizes: dict[int, int]) -> SharedWeights:
    """Views on the shared memory, laid out alike in both processes."""
    own = np.frombuffer(memory, dtype=np.float32, count=own_size)
    others, at, copies = np.frombuffer(memory, dtype=np.float16, offset=4 * own_size), 0, {}
    for block, size in copy_sizes.items():
        copies[block] = others[at : at + size]
        at += size
    return SharedWeights(own, copies)


def lay_out(changes: Sequence[Change], scratch: Floats) -> list[int]:
    """Write corrections into the scratch vector. Return how many weights each of them changes.

    Sparse corrections, the usual case, are written one after another as indices, then values. If
    one is dense or they do not fit, their dense sum is written and the list is empty.
    """
    sparse = [(change.indices, change.values) for change in changes if change.indices is not None]
    counts = [len(values) for _, values in sparse]
    if 2 * sum(counts) > len(scratch) or len(sparse) < len(changes):
        scratch.fill(0)
        for change in changes:
            change.add_to(scratch)
        return []
    at = 0
    for (indices, values), count in zip(sparse, counts, strict=True):
        scratch[at : at + count].view(np.int32)[:] = indices
        scratch[at + count : at + 2 * count] = values
        at += 2 * count
    return counts


def laid_out(scratch: Floats, counts: Sequence[int]) -> list[Change]:
    """Read back what `lay_out` wrote."""
    found, at = [], 0
    for count in counts:
        values = scratch[at + count : at + 2 * count]
        found.append(Change(scratch[at : at + count].view(np.int32), values))
        at += 2 * count
    return found or [Change(None, scratch)]


def trainer_main(connection: Connection, order: dict[str, Any], memory: Any) -> None:
    """Main function of the process: runs until ordered to stop or until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the node decides
    os.nice(5)  # the network's loop comes first
    keep_freed_memory()
    settings = TrainerSettings(**order["settings"])
    shared = shared_weights(memory, order["own_size"], order["copy_sizes"])
    try:
        trainer = _Trainer(connection, settings, shared)
    except BlockswarmError as error:
        _send(connection, {"op": "failed", "message": error.message, "hint": error.hint})
        return
    _send(connection, {"op": "ready", "device": trainer.worker.device.type})
    try:
        trainer.run_forever()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the node is gone: nothing to train for


class _Trainer:
    def __init__(self, connection: Connection, settings: TrainerSettings, shared: SharedWeights):
        if settings.threads:
            torch.set_num_threads(settings.threads)
        run = Run.from_dict(settings.run)
        device = choose_device(settings.device)
        self.run, self.connection, self.shared = run, connection, shared
        precision = autocast_dtype(device, run.model.width)
        self.worker = BlockWorker(run, settings.block, device, precision)
        followed = followed_blocks(run.model, settings.block)
        steps = run.training.copy_steps
        self.copies = {j: MovingCopy(initial_block(run, j).to(device), steps) for j in followed}
        corpus = load_corpus(settings.data_spec)
        _check_corpus(corpus, settings)
        corpus.require_window(run.model.context)
        check_leak(run, corpus)
        self.stream = WindowStream(
            corpus.train,
            run.model.context,
            run.training.batch,
            stream_seed("windows", run.seed, settings.stream, settings.block),
        )
        # No more windows at once than a step has: evaluation must not raise the peak memory.
        self.held_out = held_out_batches(
            corpus, "valid", run.model.context, HELD_OUT_BYTES, run.training.batch
        )
        self.position = 0  # of our own stream of windows
        self.steps = 0  # of this process: steps before a resume are not counted
        self.budget = 0  # steps left in this round
        self.paused = False
        self.loss_nats: float | None = None
        self.reported_s = 0.0

    def run_forever(self) -> None:
        while True:
            training = self.budget > 0 and not self.paused
            while self.connection.poll(0 if training else IDLE_POLL_S):
                order = msgpack.unpackb(self.connection.recv_bytes())
                if order["op"] == "stop":
                    _send(self.connection, {"op": "stop", "id": order["id"]})
                    return
                _send(self.connection, {**self._obey(order), "op": order["op"], "id": order["id"]})
                training = self.budget > 0 and not self.paused
            if training:
                self._step()

    def _step(self) -> None:
        device = self.worker.device
        windows = torch.from_numpy(self.stream.batch_at(self.position)).long().to(device)
        for moving in self.copies.values():
            moving.move()
        ahead = self.copies.get(self.worker.index + 1)
        loss = self.worker.step(windows[:, :-1], windows[:, 1:], self._upstream(), ahead).own_nats
        self.loss_nats = loss if self.loss_nats is None else 0.9 * self.loss_nats + 0.1 * loss
        self.position += 1
        self.steps += 1
        self.budget -= 1
        now = time.monotonic()
        if now - self.reported_s >= PROGRESS_EVERY_S or self.budget == 0:
            self.reported_s = now
            _send(self.connection, {"op": "progress", **self._progress()})

    def _progress(self) -> dict[str, Any]:
        return {"steps": self.steps, "loss_nats": self.loss_nats, "budget": self.budget}

    def _obey(self, order: dict[str, Any]) -> dict[str, Any]:
        match order["op"]:
            case "round":  # where the schedule stands, how many steps to do, and how fast
                self.worker.steps_done = order["step"]
                self.worker.rate_factor = order["rate_factor"]
                self.budget = order["steps"]
                return {}
            case "copies":  # {blocks}: these were renewed in shared memory
                for block in order["blocks"]:
                    self.copies[block].follow_flat(torch.from_numpy(self.shared.copies[block]))
                return {}
            case "snapshot":
                flat_weights(self.worker.block, self.shared.own)
                return self._progress()
            case "correct":
                for change in laid_out(self.shared.own, order["counts"]):
                    add_flat_at(self.worker.block, change)
                return {}
            case "replace":
                load_flat(self.worker.block, self.shared.own)
                self.worker.optimizer.load({})  # its moments belong to the old weights
                return {}
            case "evaluate":
                return {"ce_nats": self._evaluate(self.shared.own)}
            case "pause":
                self.paused = bool(order["paused"])
                return {}
            case "save":
                return self._save(Path(order["path"]))
            case "load":
                return self._load(Path(order["path"]))
        return {"error": f"unknown order {order['op']}"}

    def _upstream(self) -> list[MovingCopy]:
        return [self.copies[j] for j in range(self.worker.index) if j in self.copies]

    def _evaluate(self, flat: Floats) -> float:
        """Honest CE of this block with the given weights, on the host's held-out bytes."""
        twin = frozen_copy(self.worker.block)
        load_flat(twin, flat)
        if self.run.model.relays:
            return self._relayed_ce(twin)
        blocks: list[Block | None] = [None] * self.run.model.blocks
        blocks[self.worker.index] = twin
        ce = honest_ce(ComposedModel(self.run, blocks), self.held_out)
        return ce.ce_nats

    @torch.no_grad()
    def _relayed_ce(self, block: Block) -> float:
        """Honest CE over what the copies of earlier blocks relay, one in full at a time."""
        total, count = 0.0, 0
        for windows in self.held_out:
            x, y = windows[:, :-1].to(self.worker.device), windows[:, 1:].to(self.worker.device)
            hidden = block.hidden(x, relayed_hidden(self._upstream(), x))
            total += nll_sum(torch.log_softmax(block.logits(hidden).float(), dim=-1), y)
            count += y.numel()
        return total / count

    def _save(self, path: Path) -> dict[str, Any]:
        weights, state = self.worker.block.named_parameters(), self.worker.optimizer.tensors()
        tensors: dict[str, Tensor] = {f"w.{name}": tensor for name, tensor in weights}
        tensors |= {f"o.{name}": tensor for name, tensor in state.items()}
        try:
            write_tensors(path, tensors, {"position": self.position})
        except BlockswarmError as error:
            return {"error": str(error)}
        return {}

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            tensors, facts = read_tensors(path)
            self.position = int(facts["position"])
            weights = {n[2:]: t for n, t in tensors.items() if n.startswith("w.")}
            self.worker.block.load_state_dict(weights)
            optimizer = {n[2:]: t for n, t in tensors.items() if n.startswith("o.")}
            self.worker.optimizer.load(optimizer)
        except Exception as error:  # whatever is wrong with the file, the node hears of it
            return {"error": f"{path.name}: {str(error).splitlines()[0]}"}
        return {}


def _check_corpus(corpus: Corpus, settings: TrainerSettings) -> None:
    """Refuse a text other than the run's: its CE would not be comparable."""
    wanted = settings.data_sha256
    if wanted and corpus.sha256 != wanted:
        raise DataError(
            f"{settings.data_spec} is not the text of this run: its sha256 is {corpus.sha256}, "
            f"the run names {wanted} (data.sha256)",
            "the same command with the text of the run: --data PATH",
        )


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(msgpack.packb(message))
