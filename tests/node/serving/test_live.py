"""Serving by real processes: hosts with model folders, also after kill -9.

A swarm that trains answers in `test_node_commands_assemble`, which has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from node.local.model_folder import load_model, save_model
from node.network.client import visit
from node.serving.client import SweepClient
from node.serving.output import Figures, Order, Output
from protocol.identity import peer_from_text
from swarm.learning.composition import ComposedModel
from swarm.runfile import parse, run_id
from swarm.writing.generate import Sampling, generate
from tests.conftest import MakeModel, MakeRun
from tests.support.loopback import _no_daemon_left, run  # noqa: F401

GREEDY = Sampling(temperature=0.0)
NEAR_TIE_NATS = 1e-4
PROMPTS = 300
START_S = 60.0
LIMIT_S = 240.0


class ServeProcess:
    """One `blockswarm serve`."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process, self.address = process, address

    @property
    def peer_id(self) -> bytes:
        return peer_from_text(self.address.rpartition("/p2p/")[2])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)


@contextlib.asynccontextmanager
async def serving(folder: Path, model: Path, block: int, *join: str) -> AsyncIterator[ServeProcess]:
    command = [
        *("serve", *join, "--model", str(model), "--block", str(block)),
        *("--folder", str(folder), "--listen", "127.0.0.1", "--threads", "1"),
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "node.cli",
        *command,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(START_S):
            while True:
                line = (await process.stderr.readline()).decode()
                assert line, "it ended"
                if "blockswarm generate /ip4/127.0.0.1" in line:
                    break
        yield ServeProcess(process, line.split()[-1])
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await process.wait()


async def written(
    client: SweepClient, prompt: bytes, length: int, **how: int
) -> tuple[bytes, Figures]:
    output = Output(client, Order(prompt, length, GREEDY, **how))
    return b"".join([piece async for piece in output.write()]), output.figures


@pytest.mark.long
def test_processes_serve_what_the_folder_generates(
    tmp_path: Path, tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    shape = tiny_run(coupling="look_ahead", context=64, width=32)
    made = tiny_model(shape, weights=(2.0, 0.3, 1.0), temperature=1.1)
    save_model(tmp_path / "model", made, [0, 0, 0], {})
    model, _ = load_model(tmp_path / "model", torch.device("cpu"))
    run(_serve_and_compare(tmp_path, model), 900)  # 300 prompts; minutes on a busy machine


async def _serve_and_compare(tmp_path: Path, model: ComposedModel) -> None:
    folder = tmp_path / "model"
    async with contextlib.AsyncExitStack() as stack:
        start = lambda name, block, *join: stack.enter_async_context(  # noqa: E731
            serving(tmp_path / name, folder, block, *join)
        )
        first = await start("h0", 0)
        others = [("h1", 1), ("h1b", 1), ("h2", 2)]
        hosts = await asyncio.gather(*(start(n, b, first.address) for n, b in others))
        said: list[str] = []
        text, network = await stack.enter_async_context(visit([first.address], said.append))
        client = SweepClient(network, run_id(text), parse(text).run, said.append)
        stack.push_async_callback(client.close)
        await _equal_on_many_prompts(client, model)
        replicas = {host.peer_id: host for host in hosts[:2]}
        await _killed_in_mid_output(client, model, replicas)
        survivor = next(h for h in replicas.values() if h.process.returncode is None)
        survivor.kill()
        await survivor.process.wait()
        expected = bytes(generate(model.without(1), b"abc", 30, GREEDY))
        found, figures = await written(client, b"abc", 30, draft_length=8)
        assert found == expected and figures.missing == (1,)
        assert any("block 1" in line for line in said)


async def _equal_on_many_prompts(client: SweepClient, model: ComposedModel) -> None:
    rng, near_ties = random.Random(1), 0
    for _ in range(PROMPTS):
        prompt = rng.randbytes(rng.randrange(1, 90))
        expected = bytes(generate(model, prompt, 24, GREEDY))
        found, figures = await written(client, prompt, 24, draft_length=12)
        assert figures.missing == ()
        if found != expected:
            near_ties += 1
            assert gap_where_they_part(model, prompt, expected, found) < NEAR_TIE_NATS
    assert near_ties <= 2


def gap_where_they_part(
    model: ComposedModel, prompt: bytes, expected: bytes, found: bytes
) -> float:
    """Between the two likeliest bytes, by the model itself: an honest difference is in its last
    bits, where a host's arithmetic rounds differently."""
    same = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
    text = (prompt + expected[:same])[-model.run.model.context :]
    best = model.log_probs(torch.tensor([list(text)]))[0, -1].topk(2).values
    return float(best[0] - best[1])


async def _killed_in_mid_output(
    client: SweepClient, model: ComposedModel, replicas: dict[bytes, ServeProcess]
) -> None:
    """kill -9 of the replica that has the caches, between two sweeps of one output."""
    expected = bytes(generate(model, b"abc", 40, GREEDY))
    output = Output(client, Order(b"abc", 40, GREEDY, draft_length=2))
    found, used = b"", next(iter(replicas.values()))
    async for piece in output.write():
        if not found:
            used = replicas[output.figures.path[1]]
            used.kill()
            await used.process.wait()
        found += piece
    assert found == expected
    # The host before it may have noticed first and gone around by itself: then no sweep failed.
    assert output.figures.missing == () and used.peer_id not in output.figures.path
