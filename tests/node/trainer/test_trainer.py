"""The training process: real processes, orders between steps, death noticed, nothing left over."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from node.data.corpus import load_corpus
from node.trainer.process import TrainerSettings
from node.trainer.trainer import Trainer, TrainerError
from swarm.consensus.fixed_point import to_fixed
from swarm.learning.flat import Change, initial_flat
from swarm.run import ModelShape, Noise, Run, Training

SHAPE = ModelShape(blocks=3, layers=1, width=16, heads=2, context=16)
RUN = Run(model=SHAPE, training=Training(batch=2, steps=1000, warmup_steps=1))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 2000)
    return str(path)


class Heard:
    def __init__(self) -> None:
        self.progress: list[dict[str, Any]] = []
        self.died = asyncio.Event()
        self.idle = asyncio.Event()

    def on_progress(self, message: dict[str, Any]) -> None:
        self.progress.append(message)
        if message["budget"] == 0:
            self.idle.set()


@asynccontextmanager
async def training(text: str, block: int = 1) -> AsyncIterator[tuple[Trainer, Heard]]:
    heard = Heard()
    settings = TrainerSettings(RUN.to_dict(), block, text, "host", "cpu", threads=1)
    trainer = Trainer(settings, heard.on_progress, heard.died.set)
    await trainer.start()
    try:
        yield trainer, heard
    finally:
        await trainer.stop()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await coroutine

    asyncio.run(bounded())


def test_trains_exactly_its_budget_and_takes_corrections(text: str) -> None:
    async def check() -> None:
        async with training(text) as (trainer, heard):
            start = await trainer.snapshot()
            assert np.array_equal(start, initial_flat(RUN, 1))
            await trainer.begin_round(0, 5)
            await heard.idle.wait()
            trained = await trainer.snapshot()
            assert heard.progress[-1]["steps"] == 5
            assert not np.array_equal(trained, start)
            change = np.full_like(start, 0.25)
            await trainer.correct([Change(None, change)])
            assert np.array_equal(await trainer.snapshot(), trained + change)
            some = np.array([0, 7, len(start) - 1])
            changes = [Change(some, change[some]), Change(some[1:], change[some[1:]])]
            await trainer.correct(changes)
            for sparse in changes:
                sparse.add_to(trained)
            assert np.array_equal(await trainer.snapshot(), trained + change)
            await trainer.replace(start)
            assert np.array_equal(await trainer.snapshot(), start)

    run(check())


def test_evaluates_other_weights_and_reads_renewed_copies(text: str) -> None:
    async def check() -> None:
        async with training(text) as (trainer, heard):
            start = initial_flat(RUN, 1)
            honest = await trainer.evaluate(start)
            assert abs(honest - np.log(256)) < 0.3
            assert await trainer.evaluate(start * 3) != honest
            assert np.array_equal(await trainer.snapshot(), start)  # evaluating changes nothing
            # Another version of the block before this one changes what this one sees.
            await trainer.renew_copies({0: to_fixed(initial_flat(RUN, 0) * 2)})
            assert await trainer.evaluate(start) != honest
            assert not heard.progress

    run(check())


def test_pause_holds_the_budget(text: str) -> None:
    async def check() -> None:
        async with training(text) as (trainer, heard):
            await trainer.pause(True)
            await trainer.begin_round(0, 3)
            assert np.array_equal(await trainer.snapshot(), initial_flat(RUN, 1))
            await trainer.pause(False)
            await heard.idle.wait()
            assert heard.progress[-1]["steps"] == 3

    run(check())


def test_save_and_load_bring_back_weights_and_momentum(text: str, tmp_path: Path) -> None:
    async def check() -> None:
        path = tmp_path / "trainer.safetensors"
        async with training(text) as (trainer, heard):
            await trainer.begin_round(0, 4)
            await heard.idle.wait()
            await trainer.save(path)
            saved = await trainer.snapshot()
        async with training(text) as (trainer, heard):
            await trainer.load(path)
            assert np.array_equal(await trainer.snapshot(), saved)
            await trainer.begin_round(4, 2)
            await heard.idle.wait()
            assert heard.progress[-1]["steps"] == 2  # what the process before did is not its own
            path.write_bytes(b"no checkpoint")
            with pytest.raises(TrainerError, match="load"):
                await trainer.load(path)
            with pytest.raises(TrainerError, match="save"):
                await trainer.save(path / "below a file")

    run(check())


def test_weights_that_are_set_are_trained_without_the_old_ones_momentum(
    text: str, tmp_path: Path
) -> None:
    async def check() -> None:
        path = tmp_path / "trainer.safetensors"
        async with training(text) as (trainer, heard):
            await trainer.begin_round(0, 2)
            await heard.idle.wait()
            await trainer.save(path)
            assert any(name.startswith("o.") for name in load_file(path))
            await trainer.replace(initial_flat(RUN, 1))
            await trainer.save(path)
            assert not any(name.startswith("o.") for name in load_file(path))

    run(check())


def test_a_killed_process_is_noticed_and_nothing_waits_for_it(text: str) -> None:
    async def check() -> None:
        async with training(text) as (trainer, heard):
            await trainer.begin_round(0, 10**6)
            assert trainer.pid is not None
            os.kill(trainer.pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                await heard.died.wait()
            with pytest.raises(TrainerError):
                await trainer.snapshot()

    run(check())


def test_a_stop_that_is_cancelled_leaves_no_process(text: str) -> None:
    """Nobody would know of it any more: it would train on beside the next one."""

    async def check() -> None:
        async with training(text) as (trainer, heard):
            await trainer.begin_round(0, 10**6)
            pid = trainer.pid
            (process,) = [c for c in multiprocessing.active_children() if c.pid == pid]
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)  # so that it answers no order, and the stop must wait
            stopping = asyncio.create_task(trainer.stop())
            await asyncio.sleep(0.02)
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            assert trainer.pid is None
            await asyncio.to_thread(process.join, 10.0)
            assert not process.is_alive() and not heard.died.is_set()
            process.close()

    run(check())


def test_bad_data_is_refused_with_its_hint(tmp_path: Path) -> None:
    async def check() -> None:
        heard = Heard()
        missing = str(tmp_path / "nothing")
        settings = TrainerSettings(RUN.to_dict(), 0, missing, "host", "cpu", 1)
        trainer = Trainer(settings, heard.on_progress, heard.died.set)
        with pytest.raises(TrainerError, match="nothing"):
            await trainer.start()
        assert trainer.pid is None

    run(check())


def test_a_run_whose_noise_gives_the_target_away_is_refused(text: str) -> None:
    async def check() -> None:
        heard = Heard()
        leaky = dataclasses.replace(RUN, noise=Noise(sigma_min=0.1, sigma_max=10.0))
        settings = TrainerSettings(leaky.to_dict(), 0, text, "host", "cpu", 1)
        trainer = Trainer(settings, heard.on_progress, heard.died.set)
        with pytest.raises(TrainerError, match="still tells") as refused:
            await trainer.start()
        assert "--sigma-min" in refused.value.hint

    run(check())


def test_another_text_than_the_run_names_is_refused(text: str) -> None:
    async def check() -> None:
        heard = Heard()
        right = load_corpus(text).sha256
        settings = TrainerSettings(RUN.to_dict(), 0, text, "host", "cpu", 1, data_sha256="0" * 64)
        trainer = Trainer(settings, heard.on_progress, heard.died.set)
        with pytest.raises(TrainerError) as refused:
            await trainer.start()
        # What was found, what was expected, what to type.
        assert right in refused.value.message and "0" * 64 in refused.value.message
        assert "--data PATH" in refused.value.hint
        trainer = Trainer(
            dataclasses.replace(settings, data_sha256=right), heard.on_progress, heard.died.set
        )
        await trainer.start()
        await trainer.stop()

    run(check())
