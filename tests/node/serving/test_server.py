"""Serving on loopback: real daemons and streams, tiny blocks, hosts that die, stall or lie."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.serving import queue as sweep_queue
from node.serving import server as serving
from node.serving.client import NobodyServes, SweepClient
from node.serving.host import serve_weights
from node.serving.output import Order, Output
from node.serving.server import BlockServer
from protocol.errors import UsageError
from protocol.frames import Refused
from protocol.parcel import Parcel
from protocol.serving import Sweep, SweepHanded, SweepTaken, SweepWait
from swarm.learning.composition import ComposedModel
from swarm.learning.flat import flat_weights
from swarm.writing.generate import Sampling
from swarm.writing.writer import Ask
from tests.support.loopback import _no_daemon_left, node, run, until  # noqa: F401
from tests.support.serving_swarm import GREEDY, idle, local, swarm, written, written_together

PROMPTS = [b"a", b"blocks", b"", b"the swarm serves", bytes(range(30))]


@pytest.mark.parametrize("kind", ["relay", "mean"])
def test_three_hosts_write_what_the_assembled_model_writes(
    tmp_path: Path, kind: str, relay_model: ComposedModel, mean_model: ComposedModel
) -> None:
    model = relay_model if kind == "relay" else mean_model

    async def main() -> None:
        async with swarm(tmp_path, model) as s:
            client = await s.client()
            for prompt in PROMPTS:
                expected = local(model, prompt, 20)
                exact, figures = await written(client, prompt, 20, draft_length=6)
                assert exact == expected
                assert figures.traversals <= 20 and figures.failures == 0
                assert figures.missing == ()
            bytewise, figures = await written(client, b"abc", 20, draft_length=0)
            assert bytewise == local(model, b"abc", 20) and figures.traversals == 20
            alone = local(model.without(1, 2), b"abc", 8)
            one, figures = await written(client, b"abc", 8, drafts=1)
            assert one == alone and figures.traversals == 1
            many, figures = await written(client, b"abc", 8, Sampling(1.0, seed=3), drafts=4)
            assert len(many) == 8 and figures.score_nats < 0
            sampled, _ = await written(client, b"abc", 20, Sampling(1.0, seed=3), draft_length=5)
            assert len(sampled) == 20
            assert s.said == []

    run(main())


def test_outputs_at_the_same_time(tmp_path: Path, relay_model: ComposedModel) -> None:
    """More at once than one stream carries: they wait for each other and none fails."""

    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client()
            orders = [
                written(client, bytes([n]), 9, Sampling(1.0, seed=n), drafts=3) for n in range(12)
            ]
            orders += [written(client, bytes([n]), 9, draft_length=4) for n in range(6)]
            outputs = await asyncio.gather(*orders)
            for n, (text, _) in enumerate(outputs[12:]):
                assert text == local(relay_model, bytes([n]), 9)
            assert all(figures.failures == 0 for _, figures in outputs)
            await idle(s)

    run(main())


def test_64_outputs_at_once_and_none_fails(tmp_path: Path, relay_model: ComposedModel) -> None:
    """More than a host's queue and a stream's questions: who hears `busy` comes back."""

    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            clients = [await s.client(hop_min_s=10.0) for _ in range(2)]
            orders = [
                written(
                    clients[n % 2], bytes([n] * (1 + n % 3)), 6, Sampling(1.0, seed=n), drafts=2
                )
                for n in range(64)
            ]
            outputs = await asyncio.gather(*orders)
            assert all(len(text) == 6 for text, _ in outputs)
            assert all(f.missing == () for _, f in outputs), s.said
            assert not any(f.troubles for _, f in outputs), [f.troubles for _, f in outputs]
            await idle(s)

    run(main())


def test_a_host_that_dies_is_gone_around(tmp_path: Path, relay_model: ComposedModel) -> None:
    async def main() -> None:
        async with swarm(tmp_path, relay_model, "abc-d") as s:  # d: a second replica of block 1
            client = await s.client(hop_min_s=1.0)
            expected = local(relay_model, b"abc", 13)
            assert (await written(client, b"abc", 13, draft_length=4))[0] == expected
            used = await s.chosen(client, block=1)
            await s.hosts[used].stop()
            text, figures = await written(client, b"abc", 13, draft_length=4)
            assert text == expected and figures.missing == ()
            text, figures = await written(client, b"abc", 8, drafts=1)
            assert figures.missing == () and figures.traversals == 1

    run(main())


def test_a_host_that_stalls_in_mid_sweep_is_gone_around(
    tmp_path: Path, relay_model: ComposedModel
) -> None:
    """It takes the sweep and never hands it on: the host before it notices, after a hop's time."""

    async def main() -> None:
        async with swarm(tmp_path, relay_model, "abc-d") as s:
            client = await s.client(hop_min_s=1.0)
            used = await s.chosen(client, block=1)
            s.halt(used)
            text, figures = await written(client, b"abc", 9, drafts=2)
            assert len(text) == 9 and figures.missing == ()
            assert s.hosts[used].peer_id not in figures.path
            assert s.servers[used].queue.waiting  # it did take the sweep, and has it still

    run(main())


def garble(change: Callable[[Parcel], Parcel], server: BlockServer) -> list[bytes]:
    """Make a host compute rightly and send something else; the sweeps that it did so with."""
    from node.serving import carry as sweep_carry

    honest, lies = sweep_carry.parcel_of, []

    def lying(sweep: Sweep, passage: Any) -> Parcel:
        parcel = honest(sweep, passage)
        if server.network.peer_id not in sweep.path[-1:]:
            return parcel
        lies.append(sweep.sweep)
        return change(parcel)

    sweep_carry.parcel_of = lying
    return lies


GARBAGE: dict[str, Callable[[Parcel], Parcel]] = {
    "nan": lambda p: dataclasses.replace(p, hidden_drafts=p.hidden_drafts * np.nan),
    "not normal": lambda p: dataclasses.replace(p, state=p.state - 1.0),
    "above one": lambda p: dataclasses.replace(p, state=-p.state),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_host_that_lies_is_gone_around(
    tmp_path: Path, relay_model: ComposedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from node.serving import carry as sweep_carry

    monkeypatch.setattr(sweep_carry, "parcel_of", sweep_carry.parcel_of)

    async def main() -> None:
        async with swarm(tmp_path, relay_model, "abc-d") as s:
            client = await s.client()
            route = await client.route((), {})
            used = "b" if route.hops[1].peers[0] == s.hosts["b"].peer_id else "d"
            lies = garble(GARBAGE[kind], s.servers[used])
            text, figures = await written(client, b"abc", 13, draft_length=5)
            assert text == local(relay_model, b"abc", 13)
            assert figures.failures > 0 and s.hosts[used].peer_id not in figures.path
            # Found out at once, and not asked again. (Other failures are those of a slow machine.)
            assert len(lies) == 1
            assert client.penalties[s.hosts[used].peer_id] > 0

    run(main())


def test_a_block_that_nobody_serves_is_left_out(tmp_path: Path, relay_model: ComposedModel) -> None:
    async def main() -> None:
        async with swarm(tmp_path, relay_model, "a-c") as s:
            client = await s.client()
            expected = local(relay_model.without(1), b"abc", 13)
            text, figures = await written(client, b"abc", 13, draft_length=5)
            assert text == expected and figures.missing == (1,)
            assert any("block 1" in line for line in s.said)

    run(main())


@pytest.mark.parametrize("how", [{"draft_length": 5}, {"drafts": 1}])
def test_a_block_that_is_left_out_on_purpose(
    tmp_path: Path, relay_model: ComposedModel, how: dict[str, int]
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client()
            text, figures = await written(client, b"abc", 13, without=(0,), **how)
            assert len(text) == 13 and figures.missing == (0,) and len(figures.path) == 2
            if "drafts" not in how:
                assert text == local(relay_model.without(0), b"abc", 13)
            assert not any("no host" in line for line in s.said), "it was not missed"
            for without, words in (((3,), "no block 3"), ((0, 1, 2), "no block is left")):
                with pytest.raises(UsageError, match=words):
                    await written(client, b"abc", 13, without=without)

    run(main())


def test_a_block_whose_last_host_dies_is_left_out(
    tmp_path: Path, relay_model: ComposedModel
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client(hop_min_s=1.0)
            await client.route((), {})
            await s.hosts["c"].stop()
            expected = local(relay_model.without(2), b"abc", 9)
            text, figures = await written(client, b"abc", 9, draft_length=5)
            assert text == expected and figures.missing == (2,)

    run(main())


def test_lost_caches_are_rebuilt(tmp_path: Path, relay_model: ComposedModel) -> None:
    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client()
            output = Output(client, Order(b"abc", 13, GREEDY, draft_length=2))
            text = b""
            async for piece in output.write():
                text += piece
                if len(text) < 6:
                    s.servers["b"].sessions.clear()
            assert text == local(relay_model, b"abc", 13)
            assert output.figures.failures > 0

    run(main())


def test_a_host_that_dies_with_the_sweep_in_its_hands(
    tmp_path: Path, relay_model: ComposedModel
) -> None:
    """Its stream breaks: the host before it does not wait for the hop's time to be over."""

    async def main() -> None:
        async with swarm(tmp_path, relay_model, "abc-d") as s:
            client = await s.client(hop_min_s=12.0)
            used = await s.chosen(client, block=1)
            s.halt(used)
            writing = asyncio.create_task(written(client, b"abc", 9, drafts=2))
            await until(lambda: bool(s.servers[used].queue.waiting))
            await s.hosts[used].stop()
            began_s = time.monotonic()
            text, figures = await writing
            assert len(text) == 9 and figures.missing == () and figures.failures == 0
            assert time.monotonic() - began_s < 10.0

    run(main())


def test_waiting_sweeps_of_one_shape_go_together(
    tmp_path: Path, relay_model: ComposedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    honest = sweep_queue.compute_parts

    def counted(block: Any, work: Any, parts: int) -> Any:
        sizes.append(len(work))
        return honest(block, work, parts)

    monkeypatch.setattr(sweep_queue, "compute_parts", counted)

    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client()
            orders = [written(client, bytes([n]), 5, Sampling(1.0, seed=n)) for n in range(3)]
            await written_together(s, "a", orders)
            assert sizes == [3]

    run(main())


def test_waiting_sessions_of_one_shape_go_together(
    tmp_path: Path, relay_model: ComposedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With caches too, and the texts are what each would have got alone."""
    sizes: list[int] = []
    honest = sweep_queue.compute

    def counted(block: Any, work: Any, sessions: Any) -> Any:
        sizes.append(len(sessions))
        return honest(block, work, sessions)

    monkeypatch.setattr(sweep_queue, "compute", counted)

    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client()
            orders = [written(client, bytes([n, n]), 9, draft_length=3) for n in range(5)]
            for n, (text, figures) in enumerate(await written_together(s, "a", orders)):
                assert text == local(relay_model, bytes([n, n]), 9)
                assert figures.missing == () and not figures.troubles, figures.troubles
            assert sizes[0] == 5

    run(main())


def test_a_full_queue_says_busy_and_nothing_fails(
    tmp_path: Path, relay_model: ComposedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "WAITING_MAX", 1)

    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client()
            orders = [written(client, bytes([n] * (n + 1)), 5, drafts=2) for n in range(6)]
            outputs = await asyncio.gather(*orders)
            assert all(len(text) == 5 and f.missing == () for text, f in outputs)

    run(main())


def test_a_client_that_goes_away_leaves_nothing(tmp_path: Path, relay_model: ComposedModel) -> None:
    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client()
            for server in s.servers.values():
                server.sessions.idle_s = 0.3
            output = Output(client, Order(b"abc", 60, GREEDY, draft_length=1))
            pieces = output.write()
            await anext(pieces)
            writing = asyncio.ensure_future(anext(pieces))
            await asyncio.sleep(0)  # one turn: it has asked for more
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await client.network.stop()
            servers = s.servers.values()
            await until(lambda: not any(server.sessions for server in servers), 30)
            await until(lambda: not any(server.queue.jobs for server in servers), 30)
            assert not any(server.queue.held_bytes or server.queue.tasks for server in servers)

    run(main())


def test_nobody_serves(tmp_path: Path, relay_model: ComposedModel) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a, node(tmp_path, "b", await a.invitations()) as b:
            client = SweepClient(b, b.settings.run_id, relay_model.run)
            with pytest.raises(NobodyServes):
                await written(client, b"x", 4, drafts=1)

    run(main())


def test_what_a_host_refuses(tmp_path: Path, relay_model: ComposedModel) -> None:
    """Before a byte of payload is read: other runs, unknown versions, too long, wrong sizes."""

    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client()
            route = await client.route((), {})
            output = Output(client, Order(b"abc", 4, GREEDY, drafts=1))
            good = output._sweep(route, Ask(0, b"abc", 4, 0))
            server = s.servers["a"]
            server._admit(good, 3, client.network.peer_id)
            hop = dataclasses.replace(route.hops[0], digest=b"?" * 32)
            bad: list[tuple[dict[str, Any], int]] = [
                ({"run": b"?" * 32}, 3),
                ({"route": (hop.pack(), *good.route[1:])}, 3),
                ({"length": 14}, 3),
                ({}, 4),
            ]
            for changes, size in bad:
                with pytest.raises(Refused):
                    server._admit(dataclasses.replace(good, **changes), size, b"")

    run(main())


def test_a_refused_payload_does_not_end_the_stream(
    tmp_path: Path, relay_model: ComposedModel
) -> None:
    """Several questions on one stream, some with payloads that nobody wants."""

    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client()
            route = await client.route((), {})
            output = Output(client, Order(b"abc", 4, GREEDY, drafts=1))
            good = output._sweep(route, Ask(0, b"abc", 4, 0))
            pool, host = client.handover.pool, s.hosts["a"].peer_id
            asks: list[Any] = []
            for size in (3, 70_000, 5, 3):
                asks.append(pool.ask(host, good, SweepTaken, 5.0, b"x" * size))
            answers = await asyncio.gather(*asks, return_exceptions=True)
            assert [type(a).__name__ for a in answers] == ["tuple", "Refused", "Refused", "tuple"]
            assert len(pool._streams) == 1

    run(main())


def test_streams_are_replaced_before_the_peer_ends_them(
    tmp_path: Path, relay_model: ComposedModel
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, relay_model, "a") as s:
            client = await s.client()
            await client.route((), {})
            pool, host = client.handover.pool, s.hosts["a"].peer_id
            seen = set()
            question = SweepWait(sweep=b"?" * 16)
            for _ in range(3):
                many = [pool.ask(host, question, SweepHanded, 5.0) for _ in range(50)]
                for reply, stream in await asyncio.gather(*many):
                    assert reply.handed
                    assert not stream.lost.done()
                    seen.add(stream)
            assert len(seen) == 3  # 64 questions each

    run(main())


def test_hosts_keep_two_versions(tmp_path: Path, relay_model: ComposedModel) -> None:
    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            server = s.servers["a"]
            module = relay_model.blocks[0]
            assert module is not None
            for version in range(2, 6):
                serve_weights(server, 0, version, flat_weights(module) + version)
            assert [served.version.round for served in server._served.values()] == [4, 5]

    run(main())
