"""Scenarios: read from a file, refused in one line, and with faults of a seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from node.cli import cli
from node.simulator.liar import Lie
from node.simulator.scenario import Fault, Link, Scenario, read, with_storm
from protocol.errors import UsageError
from swarm.runfile import parse

TEXT = """
hosts = 6
rounds = 12
[link]
loss = 0.1
[lies]
h1 = "noise"
[later]
h2 = 1.5
[[faults]]
round = 3.5
cut = ["h3", "h4"]
[[faults]]
round = 6
heal = true
"""


def test_what_a_file_says() -> None:
    faults = (Fault(3.5, cut=("h3", "h4")), Fault(6, heal=True))
    assert read(TEXT) == Scenario(
        hosts=6,
        rounds=12,
        link=Link(loss=0.1),
        lies={"h1": Lie.NOISE},
        later={"h2": 1.5},
        faults=faults,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "not TOML"),
        ("host = 3", "unknown field in the scenario: 'host'"),
        ('hosts = "x"', "scenario.hosts: Expected int"),
        ("[link]\nloss = 7", "scenario.link.loss"),
        ("[link]\nlatency_s = nan", "scenario.link.latency_s"),
        ('[[faults]]\nround = 2\nkil = ["h1"]', r"faults\[0\]: 'kil'"),
        ('[[faults]]\nround = 2\nkill = "h1"', r"faults\[0\].kill: Expected array"),
        ("faults = 3", "scenario.faults: Expected array"),
        ('[lies]\nh1 = "truth"', "scenario.lies"),
        ("[later]\nh9 = 2.0", "there is no host h9"),
        ("hosts = 2\nblocks = 3", "2 hosts cannot train 3 blocks"),
        ("[speeds]\nh1 = 0.0", "scenario.speeds"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(text)


def test_calm_rounds_are_those_without_a_cut() -> None:
    assert [n for n in range(12) if n not in read(TEXT).calm_rounds()] == [3, 4, 5, 6]


def test_the_run_file_is_one_that_hosts_read() -> None:
    run_file = parse(read(TEXT).run_text(1000, seed=7))
    assert (run_file.rounds.count, run_file.rounds.start_s, run_file.run.seed) == (12, 1000, 7)
    assert not run_file.data.same_text


def test_a_storm_is_of_its_seed() -> None:
    calm = Scenario(rounds=30)
    assert with_storm(calm, 5, 1) == with_storm(calm, 5, 1) != with_storm(calm, 5, 2)
    assert with_storm(calm, 0, 1) == calm
    assert max(fault.round for fault in with_storm(calm, 50, 3).faults) <= 30 - 6


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("hosts = 2\nblocks = 1\nrounds = 4\n")
    well = CliRunner().invoke(cli, ["simulate", str(path), "--seeds", "2"])
    assert well.exit_code == 0 and well.stdout.splitlines()[1].startswith("seed 1: ok")
    path.write_text('hosts = 3\nblocks = 1\nrounds = 6\n[[faults]]\nround = 1.5\ncut = ["h2"]\n')
    ill = CliRunner().invoke(cli, ["simulate", str(path), "--json"])
    assert ill.exit_code == 0  # apart because it was cut off, which is no trouble
    assert CliRunner().invoke(cli, ["simulate", "nofile.toml"]).exit_code == 2
