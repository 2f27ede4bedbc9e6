"""The mode `denoise` over hosts on loopback: as written locally, bad parcels, missing blocks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from node.cli import cli
from node.local.model_folder import save_model
from node.serving.compute import compute_joint, outcome_of, parcel_of
from node.serving.host import open_folder, serve_weights
from node.serving.output import Order, Output
from protocol.errors import UsageError
from protocol.frames import Refused
from protocol.identity import peer_id_of
from protocol.parcel import Parcel, pack_parcel, parcel_bytes, unpack_parcel
from protocol.records import Record, Role
from protocol.serving import Hop, Mode, Sweep
from swarm.learning.composition import ComposedModel
from swarm.learning.flat import flat_weights
from swarm.learning.joint_denoising import JointDenoising
from swarm.runfile import parse
from swarm.writing.denoise import write
from swarm.writing.generate import Sampling
from swarm.writing.writer import Ask
from tests.conftest import MakeModel, MakeRun
from tests.support.loopback import _no_daemon_left, run  # noqa: F401
from tests.support.serving_swarm import GREEDY, idle, local, swarm, written

PEER = peer_id_of(b"p" * 32)
SAMPLED = Sampling(0.9, 40, seed=3)


@pytest.fixture
def model(tiny_run: MakeRun, tiny_model: MakeModel) -> ComposedModel:
    """All weight on the last block, as with relay: without it, the others still denoise."""
    return tiny_model(tiny_run(denoise_share=0.5), weights=(0.0, 0.0, 1.0))


def sweep_of(prompt: bytes, length: int, sampling: Sampling) -> Sweep:
    return Sweep(
        run=b"r" * 32,
        block=0,
        sweep=b"s" * 16,
        mode=int(Mode.DENOISE),
        place=0,
        route=tuple(Hop(block, b"d" * 32, 1.0, (PEER,)).pack() for block in range(3)),
        context=len(prompt),
        length=length,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        seed=sampling.seed,
        budget_s=10.0,
        hop_s=1.0,
        client=PEER,
    )


@pytest.mark.parametrize("coupling", ["independent", "look_ahead"])
def test_hop_by_hop_is_a_traversal(tiny_run: MakeRun, tiny_model: MakeModel, coupling: str) -> None:
    """Packed and unpacked between blocks, two sweeps together: the bytes that `write` gives."""
    model = tiny_model(tiny_run(denoise_share=0.5, coupling=coupling))
    joint = JointDenoising(model.run, model.targets)
    prompts = [b"abc", b"xyz"]
    asked = [Sampling(0.0, seed=1_000_004), Sampling(1.0, seed=1_000_004)]
    work = [
        (sweep_of(p, 9, s), unpack_parcel(sweep_of(p, 9, s), 16, p))
        for p, s in zip(prompts, asked, strict=True)
    ]
    for place, block in enumerate(model.blocks):
        assert block is not None
        passed = compute_joint(joint, block, work)
        if place == 2:
            break
        onward = [
            replace(s, place=place + 1, block=place + 1, hidden=int(coupling == "look_ahead"))
            for s, _ in work
        ]
        packed = [pack_parcel(s, 16, parcel_of(s, p)) for s, p in zip(onward, passed, strict=True)]
        for sweep, data in zip(onward, packed, strict=True):
            assert len(data) == parcel_bytes(sweep, 16)
        work = [(s, unpack_parcel(s, 16, d)) for s, d in zip(onward, packed, strict=True)]
    for index, prompt in enumerate(prompts):
        outcome = outcome_of(work[index][0], passed[index])
        # `write` gives its first traversal the seed 1 * 1000003 + 1.
        local = write(model, prompt, 9, replace(asked[index], seed=1))
        assert outcome.drafts[0].tobytes() == local
        assert outcome.scores is not None and float(outcome.scores.max()) <= 0


def test_three_hosts_write_what_write_writes(tmp_path: Path, model: ComposedModel) -> None:
    async def main() -> None:
        async with swarm(tmp_path, model) as s:
            client = await s.client()
            for prompt, sampling in ((b"abc", GREEDY), (b"", SAMPLED), (bytes(range(30)), SAMPLED)):
                text, figures = await written(client, prompt, 20, sampling, joint=True)
                assert text == write(model, prompt, 20, sampling)
                assert figures.traversals <= 3 and figures.failures == 0
                assert figures.missing == () and figures.score_nats < 0
            orders = [
                written(client, b"ab", 9, Sampling(1.0, seed=n), joint=True) for n in range(5)
            ]
            for n, (text, _) in enumerate(await asyncio.gather(*orders)):
                assert text == write(model, b"ab", 9, Sampling(1.0, seed=n))
            other, _ = await written(client, b"abc", 9, drafts=2)  # the other modes go on
            assert len(other) == 9 and s.said == []
            await idle(s)

    run(main(), 120)


def test_without_a_block(tmp_path: Path, model: ComposedModel) -> None:
    """The block before steps down to the next that is there, also if it is found out on the way."""

    async def main() -> None:
        async with swarm(tmp_path, model, "a-c") as s:
            client = await s.client(hop_min_s=2.0)
            text, figures = await written(client, b"abc", 9, GREEDY, joint=True)
            assert text == write(model.without(1), b"abc", 9, GREEDY)
            assert figures.missing == (1,)
            await s.hosts["c"].stop()
            text, figures = await written(client, b"abc", 9, SAMPLED, joint=True)
            assert figures.missing == (1, 2) and len(text) == 9

    run(main(), 120)


def test_one_host_of_all_blocks(tmp_path: Path, model: ComposedModel) -> None:
    """Nobody can dial himself: what goes on to a block of the same host stays there."""

    async def main() -> None:
        async with swarm(tmp_path, model, "a") as s:
            server, network = s.servers["a"], s.hosts["a"]
            for block in (1, 2):
                module = model.blocks[block]
                assert module is not None
                serve_weights(server, block, 1, flat_weights(module))
                record = Record(
                    run=network.settings.run_id,
                    role=int(Role.SERVER),
                    block=block,
                    round=0,
                    sequence=0,
                )
                await network.announce(record)
            client = await s.client()
            text, figures = await written(client, b"abc", 20, SAMPLED, joint=True)
            assert text == write(model, b"abc", 20, SAMPLED)
            assert figures.missing == () and figures.failures == 0
            exact, figures = await written(client, b"abc", 20, draft_length=6)
            assert exact == local(model, b"abc", 20) and figures.missing == ()
            many = await asyncio.gather(
                *(written(client, bytes([n]), 9, drafts=2) for n in range(8))
            )
            assert all(len(text) == 9 and f.missing == () and not f.failures for text, f in many)
            assert s.said == []
            await idle(s)

    run(main(), 120)


def test_what_a_host_refuses(tmp_path: Path, model: ComposedModel) -> None:
    async def main() -> None:
        async with swarm(tmp_path, model, "a") as s:
            client = await s.client()
            route = await client.route((), {})
            output = Output(client, Order(b"abc", 4, GREEDY, joint=True))
            good = output._sweep(route, Ask(0, b"abc", 4, 0))
            assert good.mode == Mode.DENOISE and good.drafts == 1
            server = s.servers["a"]
            server._admit(good, 3, client.network.peer_id)
            bad: list[tuple[dict[str, Any], int]] = [({"length": 14}, 3), ({}, 4)]
            for changes, size in bad:
                with pytest.raises(Refused):
                    server._admit(dataclasses.replace(good, **changes), size, b"")
            server.joint = None  # a run that was not trained for it
            with pytest.raises(Refused, match="denoise"):
                server._admit(good, 3, client.network.peer_id)

    run(main(), 60)


def test_a_host_that_sends_garbage_is_gone_around(
    tmp_path: Path, model: ComposedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in z: the next host refuses it and says who sent it, and another replica is asked."""
    from node.serving import carry as sweep_carry

    async def main() -> None:
        async with swarm(tmp_path, model, "abcd") as s:
            client = await s.client()
            route = await client.route((), {})
            liar = route.hops[0].peers[0]
            honest = sweep_carry.Carrier.carry

            async def lying(self: sweep_carry.Carrier, job: Any, passage: Any) -> None:
                if self.network.peer_id == liar:
                    found = passage.denoised
                    bad = replace(found, z=found.z * float("nan"))
                    passage = replace(passage, denoised=bad)
                await honest(self, job, passage)

            monkeypatch.setattr(sweep_carry.Carrier, "carry", lying)
            text, figures = await written(client, b"abc", 9, GREEDY, joint=True)
            # Another attempt asks with another seed, so the text is another, too.
            assert len(text) == 9 and figures.failures > 0 and liar not in figures.path
            assert client.penalties[liar] > 0

    run(main(), 120)


def test_a_run_that_was_not_trained_for_it(
    tmp_path: Path, tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    plain = tiny_model(tiny_run())

    async def main() -> None:
        async with swarm(tmp_path, plain, "a") as s:
            client = await s.client()
            with pytest.raises(UsageError, match="not trained"):
                await written(client, b"abc", 4, GREEDY, joint=True)

    run(main(), 60)


def test_parcels_hold_z_and_no_drafts() -> None:
    sweep = replace(sweep_of(b"abc", 4, GREEDY), place=1, block=1)
    parcel = Parcel(np.frombuffer(b"abc", np.uint8), z=np.ones((4, 16), np.float32))
    found = unpack_parcel(sweep, 16, pack_parcel(sweep, 16, parcel))
    assert found.drafts is None and found.state is None and found.z is not None


# --- the command line ---------------------------------------------------------------------------


def test_generate_from_a_folder(
    tmp_path: Path, model: ComposedModel, tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    save_model(tmp_path / "joint", model, [1, 1, 1], {})
    save_model(tmp_path / "plain", tiny_model(tiny_run()), [1, 1, 1], {})
    words = ["--prompt", "abc", "--length", "20", "--mode", "denoise", "--seed", "3", "--json"]
    result = CliRunner().invoke(cli, ["generate", str(tmp_path / "joint"), *words])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert bytes.fromhex(facts["hex"]) == write(model, b"abc", 20, Sampling(0.8, 0, 3))
    refused = CliRunner().invoke(cli, ["generate", str(tmp_path / "plain"), *words])
    assert isinstance(refused.exception, UsageError)
    assert "--denoise-share" in refused.exception.hint


def test_a_folder_is_served_as_it_was_trained(tmp_path: Path, model: ComposedModel) -> None:
    """Its run file tells clients that it denoises."""
    save_model(tmp_path, model, [1, 1, 1], {})
    folder = open_folder(tmp_path, torch.device("cpu"))
    assert parse(folder.run_file).run.denoises and folder.model.run == model.run


def test_train_with_a_share(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the blocks of a swarm denoise. " * 400)
    small = ["--blocks", "2", "--layers", "1", "--width", "16", "--heads", "2", "--context", "16"]
    given = ["--data", str(text), "--steps", "3", "--evaluate-bytes", "200", "--threads", "1"]
    out = ["-o", str(tmp_path / "model"), "--json", "--device", "cpu"]
    share = ["--denoise-share", "0.25"]
    result = CliRunner().invoke(cli, ["train", *out, *small, *given, *share])
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "model" / "manifest.json").read_text())
    assert manifest["run"]["training"]["denoise_share"] == 0.25
    words = ["--mode", "denoise", "--length", "5", "--json", "--device", "cpu", "--threads", "1"]
    result = CliRunner().invoke(cli, ["generate", str(tmp_path / "model"), *words])
    assert result.exit_code == 0 and json.loads(result.stdout)["length_bytes"] == 5
