"""What taking part costs, in words: every figure is there, and a lack is called one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from node.console.amounts import size_words
from node.host import cost_words
from node.host.cost_words import cost_lines
from node.host.options import HostOptions
from swarm.cost import RUNTIME_BYTES, disk_bytes, expected_gb_per_day, worker_memory_bytes
from swarm.run_template import PRESETS, preset
from swarm.runfile import DataRules
from tests.support.paths import ROOT

TINY = preset("tiny", "tiny")


def test_memory_traffic_disk_and_text(tmp_path: Path) -> None:
    text = "\n".join(cost_lines(TINY, tmp_path / "not" / "yet", HostOptions()))
    assert f"memory   {size_words(worker_memory_bytes(TINY))}" in text
    assert f"traffic  {size_words(1e9 * expected_gb_per_day(TINY, 2))} a day" in text
    assert f"disk     {size_words(disk_bytes(TINY, 2))} in {tmp_path}" in text
    assert "no download" in text and "free here" in text and "limit" not in text


def test_limits_are_shown_beside_it(tmp_path: Path) -> None:
    options = HostOptions(
        block=0, data="book.txt", max_memory=2, max_gb_per_day=5, up_mbps=10, down_mbps=20
    )
    text = "\n".join(cost_lines(TINY, tmp_path, options, 3))
    assert "for 3 workers" in text and "--max-memory allows 2.0 GB" in text
    assert "your limit: 5.0 GB a day; at most 10 Mbit/s up and 20 Mbit/s down" in text
    assert f"memory   {size_words(3 * worker_memory_bytes(TINY, 0))}" in text
    assert "your own, book.txt" in text


def test_too_little_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_words, "available_memory_bytes", lambda: 10**8)
    assert "NOT ENOUGH" in cost_lines(TINY, tmp_path, HostOptions())[1]


def test_what_is_downloaded(tmp_path: Path) -> None:
    small = preset("small", "s")
    text = cost_lines(small, tmp_path, HostOptions(block=0))[4]
    assert "wikitext-103: 192.0 MB downloaded once" in text
    own = replace(TINY, data=DataRules("own", ""))
    assert "--data" in cost_lines(own, tmp_path, HostOptions())[4]


def test_the_table_of_the_host_guide() -> None:
    """The page shows what the program would say."""
    page = (ROOT / "docs" / "host-guide.md").read_text()
    hosts = (2, 3, 4, 16)
    for name in PRESETS:
        run = preset(name, name)
        daily = [expected_gb_per_day(run, count) for count in hosts]
        traffic = " / ".join(f"{gb:.1f}" if gb < 10 else f"{gb:.0f}" for gb in daily)
        disk = dict.fromkeys(size_words(disk_bytes(run, count)) for count in (2, 16))
        memory = size_words(worker_memory_bytes(run))
        assert f"| `{name}` | {memory} | {traffic} | {' to '.join(disk)} |" in page
    assert f"both ways, {' / '.join(map(str, hosts))} hosts on each block" in page
    wanted = {name: preset(name, name).exchange.min_replicas for name in PRESETS}
    assert wanted == {"tiny": 2, "small": 3, "large": 3}
    assert "`min_replicas`: 2 in `tiny`, 3 in `small` and `large`" in page
    assert f"about {RUNTIME_BYTES / 1e9:.1f} GB of it is Python, torch and p2pd" in page
