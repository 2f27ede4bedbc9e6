"""From options to settings, and what is said before a host begins."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from node.host.options import HostOptions
from node.host.taking_part import (
    Part,
    network_settings,
    say_if_over,
)
from swarm.run_template import emit, preset
from swarm.runfile import with_start

TINY = preset("tiny", "tiny")
OPTIONS = HostOptions(listen=("127.0.0.1",), port=4001, up_mbps=8.0)


def test_rates_are_in_megabits(tmp_path: Any) -> None:
    text = with_start(emit(TINY), int(time.time()))
    settings = network_settings(Part(text, tmp_path, (), True, OPTIONS))
    assert settings.up_bytes_per_s == 1_000_000.0 and settings.down_bytes_per_s is None
    assert settings.daemon.port == 4001 and settings.state_folder == tmp_path


def test_a_run_that_is_over_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    length_s = TINY.rounds.count * TINY.rounds.period_s

    def run(ago_s: float) -> Any:
        start_s = int(time.time() - length_s - ago_s)
        return replace(TINY, rounds=replace(TINY.rounds, start_s=start_s))

    say_if_over(run(-100), ("/an/address",))
    assert capsys.readouterr().err == ""
    say_if_over(run(7200), ("/an/address",))
    said = capsys.readouterr().err
    assert "ended 2 h ago" in said and "blockswarm assemble /an/address" in said
    say_if_over(run(600), ())
    assert "10 min" in capsys.readouterr().err
