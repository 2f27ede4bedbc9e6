"""What `assemble` decides besides pulling: which text judges, which model stays, and where."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.assembly.job import (
    AssembleOptions,
    Judge,
    _folder_of_run,
    _Job,
    load_judge,
    traffic_facts,
)
from node.assembly.pull import Assembled
from node.local.model_folder import load_model, read_manifest, save_model
from protocol.errors import DataError, UsageError
from protocol.frames import Tally
from protocol.ledger import Ledger
from protocol.messages import Purpose
from swarm.learning.composition import ComposedModel
from swarm.learning.worker import initial_block
from swarm.runfile import DataRules, RunFile
from tests.support.live import tiny_run_file

RUN_ID = bytes(range(32))
TEXT = "".join(f"{n} green bottles hanging on the wall\n" for n in range(400))


@pytest.fixture
def run_file() -> RunFile:
    return tiny_run_file(width=16, context=16)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def pulled(run_file: RunFile, version: int, noise: float) -> Assembled:
    """A model that predicts the worse, the more noise is in its heads."""
    blocks = [initial_block(run_file.run, index) for index in range(2)]
    generator = torch.Generator().manual_seed(1)
    for block in blocks:
        block.requires_grad_(False)
        block.head.weight.normal_(0.0, noise, generator=generator)
    versions: list[int | None] = [version - 1, version]
    facts = [
        {"block": b, "round": version + b - 2, "consensus": "", "signers": [], "contributors": {}}
        for b in range(2)
    ]
    return Assembled(ComposedModel(run_file.run, blocks), versions, facts)


def job(run_file: RunFile, out: Path, text: Path, **changes: Any) -> _Job:
    options = AssembleOptions((), out, data=str(text), evaluate_bytes=1024, **changes)
    judge = load_judge(run_file, options)
    unused: Any = None
    return _Job(options, run_file, RUN_ID, unused, judge, torch.device("cpu"), Ledger())


def test_the_best_by_held_out_ce_stays(run_file: RunFile, text: Path, tmp_path: Path) -> None:
    work = job(run_file, tmp_path / "m", text)
    told: list[Any] = []

    async def rounds() -> Any:
        best = await work._consider(pulled(run_file, 3, 0.5), None, told.append)
        best = await work._consider(pulled(run_file, 4, 0.1), best, told.append)
        return await work._consider(pulled(run_file, 5, 0.9), best, told.append)

    best = asyncio.run(rounds())
    assert [line["kept"] for line in told] == [True, True, False]
    assert best["round"] == told[2]["best_round"] == 3
    manifest = read_manifest(tmp_path / "m")
    assert [block["version"] for block in manifest["blocks"]] == [3, 4]
    # Chosen on one split, reported on another.
    assert manifest["assembly"]["held_out"]["split"] == "valid"
    assert manifest["evaluation"]["split"] == "test"
    # A watch that goes on later has to beat what is there; judged by other bytes it begins anew.
    assert work._best_of(manifest) == best
    other = replace(work.options, evaluate_bytes=512)
    work.judge = load_judge(run_file, other)
    assert work._best_of(manifest) is None
    assert work._best_of({"assembly": {"held_out": None}}) is None


def test_the_manifest_names_the_text_for_any_folder(
    run_file: RunFile, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(text.parent)
    work = job(run_file, tmp_path / "m", Path(text.name))
    asyncio.run(work._write(pulled(run_file, 3, 0.5), pulled(run_file, 3, 0.5).model, None))
    assert read_manifest(tmp_path / "m")["data"]["spec"] == str(text)


def test_weights_are_fitted_if_asked(run_file: RunFile, text: Path, tmp_path: Path) -> None:
    plain, fitted = (
        job(run_file, tmp_path / "a", text),
        job(run_file, tmp_path / "b", text, fit=True),
    )
    found = pulled(run_file, 3, 0.5)
    _, before = plain._judged(found)
    model, after = fitted._judged(found)
    assert before is not None and after is not None and after < before
    asyncio.run(fitted._write(found, model, after))
    loaded, manifest = load_model(tmp_path / "b", torch.device("cpu"))
    assert manifest["assembly"]["fitted"] and loaded.temperature == model.temperature


def test_without_text_the_newest_stays(run_file: RunFile, text: Path, tmp_path: Path) -> None:
    work = job(run_file, tmp_path / "m", text)
    work.judge = None

    async def rounds() -> Any:
        best = await work._consider(pulled(run_file, 3, 0.1), None, lambda facts: None)
        return await work._consider(pulled(run_file, 4, 0.9), best, lambda facts: None)

    best = asyncio.run(rounds())
    assert best["round"] == 3 and best["held_out_ce_nats"] is None and "ce_nats" not in best
    assert read_manifest(tmp_path / "m")["evaluation"] is None


def test_which_text_judges(run_file: RunFile, text: Path, tmp_path: Path) -> None:
    options = AssembleOptions((), tmp_path, data=str(text), evaluate_bytes=1024)
    judge = load_judge(run_file, options)
    assert isinstance(judge, Judge) and judge.corpus.size_bytes == len(TEXT)
    assert load_judge(run_file, replace(options, evaluate_bytes=0)) is None
    with pytest.raises(UsageError, match="--fit"):
        load_judge(run_file, replace(options, evaluate_bytes=0, fit=True))
    own = replace(run_file, data=DataRules("own", ""))
    with pytest.raises(UsageError, match="its own text"):
        load_judge(own, replace(options, data=None))
    pinned = replace(run_file, data=DataRules("python", "0" * 64))
    with pytest.raises(DataError, match="not the run's"):
        load_judge(pinned, replace(options, data=None))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "no text was named"),
        ("~no-such-user-here/text", "no such file or folder: '~no-such-user-here/text'"),
        ("wikitext2", "no such file or folder: 'wikitext2'"),
    ],
)
def test_a_text_that_is_none_is_told_as_it_was_typed(
    run_file: RunFile, tmp_path: Path, typed: str, said: str
) -> None:
    options = AssembleOptions((), tmp_path, data=typed, evaluate_bytes=1024)
    with pytest.raises(DataError) as told:
        load_judge(run_file, options)
    assert told.value.message == said


def test_a_folder_of_another_model_is_left_alone(run_file: RunFile, tmp_path: Path) -> None:
    assert _folder_of_run(tmp_path, RUN_ID) is None
    found = pulled(run_file, 3, 0.1)
    save_model(tmp_path, found.model, found.versions, {"assembly": {"run_id": RUN_ID.hex()}})
    assert _folder_of_run(tmp_path, RUN_ID) is not None
    for facts in ({}, {"assembly": {"run_id": "ab"}}, {"assembly": 3}):
        save_model(tmp_path, found.model, found.versions, facts)
        with pytest.raises(UsageError, match="not of this run"):
            _folder_of_run(tmp_path, RUN_ID)


def test_when_a_watch_looks_again_and_when_it_ends(
    run_file: RunFile, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tiny_run_file(width=16, context=16, count=10)
    rounds = replace(small.rounds, start_s=1000)
    work = job(replace(small, rounds=rounds), tmp_path, text)
    now = 1000.0
    monkeypatch.setattr("node.assembly.job.time.time", lambda: now)
    assert work._until_next_s() == pytest.approx(4.0 + rounds.deadline_ceiling_s)
    assert not work._over()
    now = 1000.0 + 4.0 * 12
    assert work._over()


def test_bytes_by_purpose_and_estimates_apart() -> None:
    ledger = Ledger()
    ledger.book(Tally(bytes_in=7, bytes_out=5), "a peer", Purpose.ASSEMBLY, 1)
    ledger.book_estimate("dht", 3, 2)
    facts = traffic_facts(ledger)
    assert (facts["received_bytes"], facts["sent_bytes"]) == (7, 5)
    assert facts["by_purpose"] == {"assembly": {"sent_bytes": 5, "received_bytes": 7}}
    assert facts["estimated"] == {"dht": {"sent_bytes": 2, "received_bytes": 3}}
