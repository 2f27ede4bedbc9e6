"""A host that trains serves its consensus: versions, budgets, moves, and what is not served."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from node.host.host import Host
from node.host.settings import HostSettings
from node.network.network import NetworkSettings
from node.serving.client import NobodyServes, SweepClient
from node.serving.host import versions_kept
from node.serving.output import Order, Output
from node.serving.trained import TrainedServer, WeightsOf, trained_server
from protocol.records import Record, Role
from swarm.consensus.fixed_point import Quanta, to_fixed, to_float
from swarm.learning.composition import ComposedModel
from swarm.learning.flat import flat_weights, initial_flat, load_flat
from swarm.run_template import emit
from swarm.runfile import run_id, with_start
from swarm.writing.generate import Sampling, generate
from tests.conftest import MakeModel, MakeRun
from tests.support.live import tiny_run_file
from tests.support.loopback import _no_daemon_left, daemon_settings, node, run, until  # noqa: F401

GREEDY = Sampling(temperature=0.0)


async def written(client: SweepClient, length: int) -> bytes:
    output = Output(client, Order(b"abc", length, GREEDY, draft_length=4))
    return b"".join([piece async for piece in output.write()])


def test_a_consensus_is_served_until_the_budget_is_spent(
    tmp_path: Path, tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    model: ComposedModel = tiny_model(tiny_run(blocks=2, coupling="independent"))
    for block in model.blocks:  # a consensus is in fixed point
        assert block is not None
        load_flat(block, to_float(to_fixed(flat_weights(block))))

    async def main() -> None:
        async with node(tmp_path, "a") as a, node(tmp_path, "b", await a.invitations()) as b:
            run_id = a.settings.run_id
            trained = TrainedServer(a, run_id, model.run, threads=1)
            trained.start()
            client = SweepClient(b, run_id, model.run)
            try:
                await a.announce(Record(run=run_id, role=int(Role.SERVER), block=0, round=0,
                                        sequence=0))  # fmt: skip
                for number in range(4):
                    module = model.blocks[0]
                    assert module is not None
                    trained.offer(0, number - 1, given(to_fixed(flat_weights(module)) + 3 - number))
                    await until(partial(serves, trained, number))
                assert rounds_of(trained) == [2, 3]  # it keeps two
                expected = bytes(generate(model.without(1), b"abc", 9, GREEDY))
                assert trained.server._built == {}  # nobody has asked for any of them
                assert await written(client, 9) == expected
                assert len(trained.server._built) == 1
                trained.mute(True)
                client.look_again()
                with pytest.raises(NobodyServes):
                    await written(client, 9)
                trained.mute(False)
                client.look_again()
                assert await written(client, 9) == expected
                other = model.blocks[1]
                assert other is not None
                trained.offer(1, 5, given(to_fixed(flat_weights(other))))  # the host has moved
                await until(lambda: trained.server.blocks == (1,))
            finally:
                await client.close()
                await trained.stop()

    run(main())


def given(weights: Quanta) -> WeightsOf:
    return lambda number: weights


def serves(trained: TrainedServer, number: int) -> bool:
    return number in rounds_of(trained)


def rounds_of(trained: TrainedServer) -> list[int]:
    return [served.version.round for served in trained.server._served.values()]


def test_versions_come_faster_than_they_are_built(tmp_path: Path, tiny_run: MakeRun) -> None:
    """Then the newest are, as many as are kept."""
    spec = tiny_run(blocks=2, coupling="look_ahead")

    async def main() -> None:
        async with node(tmp_path, "a") as a:
            trained = TrainedServer(a, a.settings.run_id, spec, threads=None)
            trained.start()
            try:
                weights = to_fixed(initial_flat(spec, 0))
                for number in range(20):
                    trained.offer(0, number, given(weights + number))
                await until(lambda: 20 in rounds_of(trained))
                kept = versions_kept(spec)
                assert rounds_of(trained) == list(range(21 - kept, 21))
            finally:
                await trained.stop()

    run(main())


def test_a_version_that_is_gone_is_not_served_as_another(tmp_path: Path, tiny_run: MakeRun) -> None:
    """The weights of a round that can be had no more, or that are not what they were then."""
    spec = tiny_run(blocks=2, coupling="independent")
    weights = to_fixed(initial_flat(spec, 0))
    held: dict[int, Quanta] = {0: weights, 1: weights + 1}

    async def main() -> None:
        async with node(tmp_path, "a") as a:
            trained = TrainedServer(a, a.settings.run_id, spec, threads=None)
            trained.start()
            try:
                trained.offer(0, 0, held.get)
                await until(partial(serves, trained, 1))
                trained.offer(0, 7, held.get)  # gone before it has a name
                trained.offer(0, 1, held.get)
                await until(partial(serves, trained, 2))
                assert rounds_of(trained) == [1, 2]
                first, second = trained.server._served
                assert trained.server._module_of(second) is not None
                held[0] = weights + 5
                assert trained.server._module_of(first) is None
                del held[0]
                assert trained.server._module_of(first) is None
                held[0] = weights
                module = trained.server._module_of(first)
                assert module is not None
                assert (to_fixed(flat_weights(module)) == weights).all()
                assert trained.server._module_of(first) is module  # it is built once
            finally:
                await trained.stop()

    run(main())


def test_edm_is_not_served_and_that_is_said(tiny_run: MakeRun) -> None:
    said: list[str] = []
    network: Any = None  # not so much as looked at
    spec = tiny_run(objective="edm", coupling="independent")
    assert trained_server(network, b"", spec, 1, said.append) is None
    assert len(said) == 1 and "edm" in said[0]


@pytest.mark.parametrize("serve", [True, False])
def test_a_host_announces_that_it_serves_unless_told_not_to(tmp_path: Path, serve: bool) -> None:
    text = with_start(emit(tiny_run_file()), 1_700_000_000)
    network = NetworkSettings(daemon_settings(tmp_path, "h"), run_id(text), text)

    async def main() -> None:
        settings = HostSettings(network, tmp_path, seed=True, serve=serve)
        host = Host(settings, lambda line: None)
        try:
            expected = Role.REPLICA | Role.SEED | (Role.SERVER if serve else Role(0))
            assert host._role() == int(expected) == host._status().role
        finally:
            await host.network.stop()

    run(main())
