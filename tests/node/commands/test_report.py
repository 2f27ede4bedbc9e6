"""`blockswarm report`: which folders are a run, what is written, what a person is told."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from node.cli import cli
from node.commands import report as cli_reporting
from node.commands.report import find_logs, report
from protocol.errors import UsageError
from swarm.events import NodeEvent, RoundEvent, Traffic, to_line
from swarm.run_template import emit, preset


def write_host(folder: Path, peer: str, rounds: int = 3) -> Path:
    folder.mkdir(parents=True)
    events = [to_line(NodeEvent(1000.0, peer, "started"))]
    for n in range(1, rounds + 1):
        traffic = (Traffic("update", 1000, 1000),)
        event = RoundEvent(
            1000.0 + n, peer, 0, n, "decided", (), (), (), (), (peer,), (), True, 2, 1.0,
            "c" * 64, n, 10, traffic, 4.0, 6.0 - n, 5,
        )  # fmt: skip
        events.append(to_line(event))
    (folder / "events.jsonl").write_text("\n".join(events) + "\n")
    return folder


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    folder = tmp_path / "demo" / "hosts"
    for peer in ("seed", "worker"):
        write_host(folder / peer, peer)
    (folder / "seed" / "run.toml").write_bytes(emit(preset("tiny", "Our run")))
    return folder


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(report, list(map(str, arguments)))


def test_json_csv_and_page(hosts: Path, tmp_path: Path) -> None:
    out, table = tmp_path / "new" / "report.html", tmp_path / "rows.csv"
    result = invoke(hosts, "-o", out, "--json", "--csv", table)
    assert result.exit_code == 0, result.exception
    facts = json.loads(result.stdout)
    assert facts["written"] == [str(out), str(table)]
    (run,) = facts["runs"]
    training = preset("tiny", "x").run
    step_bytes = training.training.batch * training.model.context
    assert (run["name"], run["run_name"], run["counting"]) == ("hosts", "Our run", "sent")
    assert (run["moved_bytes"], run["first_ce_nats"], run["last_ce_nats"]) == (6000, 5.0, 3.0)
    assert run["gb_per_nat"] == pytest.approx(3e-6)
    assert run["seen_bytes"] == 30 * step_bytes
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 6
    assert rows[-1]["moved_bytes_so_far"] == "6000" and rows[-1]["consensus_ce_nats"] == "3.0"
    assert "Our run" in out.read_text()


def test_text_for_a_person(hosts: Path, tmp_path: Path) -> None:
    result = invoke(hosts, "-o", tmp_path / "r.html")
    assert "hosts: 2 hosts, 1 blocks" in result.output
    assert "GB per nat 3e-06 since the first measurement" in result.output
    assert "rounds decided 3 of 3; one head in 3 of 3 compared" in result.output
    assert f"wrote {tmp_path / 'r.html'}" in result.output


def test_run_file_beside_the_hosts(hosts: Path, tmp_path: Path) -> None:
    (hosts / "seed" / "run.toml").rename(hosts / "run.toml")
    facts = json.loads(invoke(hosts, "-o", tmp_path / "r.html", "--json").stdout)
    assert facts["runs"][0]["run_name"] == "Our run"


def test_one_host_and_several_runs(hosts: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    facts = json.loads(invoke(hosts / "seed", hosts / "worker", "-o", out, "--json").stdout)
    assert [run["name"] for run in facts["runs"]] == ["seed", "worker"]
    assert {run["counting"] for run in facts["runs"]} == {"sent+received"}
    assert "Runs compared" in out.read_text()
    again = json.loads(invoke(hosts, hosts, "-o", out, "--json").stdout)
    assert [run["name"] for run in again["runs"]] == [str(hosts)] * 2


def test_hosts_of_different_runs(hosts: Path, tmp_path: Path) -> None:
    (hosts / "worker" / "run.toml").write_bytes(emit(preset("tiny", "Another")))
    result = invoke(hosts, "-o", tmp_path / "r.html")
    assert isinstance(result.exception, UsageError)
    assert "hosts of different runs" in result.exception.message


def test_damaged_run_file_is_noted(hosts: Path, tmp_path: Path) -> None:
    (hosts / "seed" / "run.toml").write_bytes(b"\xff" * 200)
    facts = json.loads(invoke(hosts, "-o", tmp_path / "r.html", "--json").stdout)
    assert any("run.toml is not used" in note for note in facts["runs"][0]["notes"])


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, what in ((tmp_path / "gone", "there is no folder"), (tmp_path, "no events.jsonl")):
        error = invoke(folder, "-o", tmp_path / "r.html").exception
        assert isinstance(error, UsageError) and what in error.message and error.hint
    monkeypatch.setattr(cli_reporting, "MAX_HOSTS", 1)
    for name in ("a", "b"):
        write_host(tmp_path / "many" / name, name)
    with pytest.raises(UsageError, match="too large to search"):
        find_logs(tmp_path / "many")


def test_links_to_folders_are_not_followed(hosts: Path) -> None:
    (hosts / "again").symlink_to(hosts)
    assert len(find_logs(hosts)) == 2
    assert find_logs(hosts / "seed" / "events.jsonl") == [hosts / "seed" / "events.jsonl"]


def test_other_schema_is_refused(hosts: Path, tmp_path: Path) -> None:
    log = hosts / "seed" / "events.jsonl"
    log.write_text(log.read_text().replace('"v":1', '"v":2'))
    error = invoke(hosts, "-o", tmp_path / "r.html").exception
    assert isinstance(error, UsageError)
    assert "seed/events.jsonl, line 1: event log of schema version 2" in error.message
    assert not (tmp_path / "r.html").exists()


def test_formulas_are_text_in_csv(tmp_path: Path) -> None:
    write_host(tmp_path / "h", "=1+1")
    table = tmp_path / "t.csv"
    assert invoke(tmp_path / "h", "-o", tmp_path / "r.html", "--csv", table).exit_code == 0
    assert {row["peer"] for row in csv.DictReader(table.read_text().splitlines())} == {"'=1+1"}


def test_png(hosts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")  # of the extra `bench`; --png says so without it
    folder = tmp_path / "plots"
    renamed = hosts.rename(hosts.with_name("_$x$"))
    result = invoke(renamed, renamed / "seed", "-o", tmp_path / "r.html", "--png", folder)
    assert result.exit_code == 0, result.exception
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "ce_over_gb.png",
        "ce_over_seconds.png",
        "ce_over_seen.png",
        "bytes_by_purpose.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_png_without_matplotlib(
    hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = invoke(hosts, "-o", tmp_path / "r.html", "--png", tmp_path / "p").exception
    assert isinstance(error, UsageError)
    assert "blockswarm[bench]" in error.hint
    assert not (tmp_path / "p").exists() and not (tmp_path / "r.html").exists()
    assert invoke(hosts, "-o", tmp_path / "r.html").exit_code == 0


def test_png_into_a_folder_that_cannot_be_made(hosts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "plots"):
        result = invoke(hosts, "-o", tmp_path / "r.html", "--png", folder)
        assert isinstance(result.exception, UsageError)
        assert "cannot make the folder" in result.exception.message
        assert "--png" in result.exception.hint


def test_out_is_a_folder(hosts: Path, tmp_path: Path) -> None:
    error = invoke(hosts, "-o", tmp_path).exception
    assert isinstance(error, UsageError) and "is a folder" in error.message


def test_it_is_a_command() -> None:
    assert cli.commands["report"] is report
