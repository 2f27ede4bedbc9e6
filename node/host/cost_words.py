"""What taking part will cost, in words, before it begins.

Puts the estimates of `swarm.cost` beside what this machine has and what its owner allows. Decides
nothing: a host that is short of memory or disk is told so, and may still try.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from node.console.amounts import size_words
from node.host.options import HostOptions
from node.machine.memory import available_memory_bytes
from swarm.cost import disk_bytes, expected_gb_per_day, worker_memory_bytes
from swarm.runfile import RunFile

PYTHON_TEXT = "the library of this machine's Python, no download"


def cost_lines(run_file: RunFile, home: Path, options: HostOptions, workers: int = 1) -> list[str]:
    """For the costliest block unless one is named, with as many hosts on each as the run wants."""
    hosts, block = run_file.exchange.min_replicas, options.block
    named = block if block is not None and 0 <= block < run_file.run.model.blocks else None
    memory = workers * worker_memory_bytes(run_file, named)
    daily = workers * expected_gb_per_day(run_file, hosts, named)
    disk = workers * disk_bytes(run_file, hosts, named)
    per = f", for {workers} workers," if workers > 1 else ""
    has_memory, has_disk = available_memory_bytes(), _free_disk_bytes(home)
    return [
        f"this will cost{per} about:",
        f"  memory   {size_words(memory)}{_against(memory, has_memory, 'free here')}"
        + _limit(options.memory_bytes, "--max-memory allows {}"),
        f"  traffic  {size_words(daily * 1e9)} a day, both ways, with {hosts} hosts on each block"
        + _limit(options.bytes_per_day, "your limit: {} a day")
        + _rates(options),
        f"  disk     {size_words(disk)} in {home}{_against(disk, has_disk, 'free there')}",
        f"  text     {_text(run_file, options.data)}",
    ]


def seed_cost_line() -> str:
    """Of a seed that does not train."""
    return "this will cost about 0.3 GB of memory and next to no traffic or disk"


def _free_disk_bytes(home: Path) -> int | None:
    for folder in (home, *home.parents):
        with suppress(OSError):
            return shutil.disk_usage(folder).free
    return None


def _against(needed: int, there: int | None, where: str) -> str:
    if there is None:
        return ""
    warning = ": NOT ENOUGH" if needed > there else ""
    return f" ({size_words(there)} {where}{warning})"


def _limit(limit_bytes: int | None, words: str) -> str:
    return "" if limit_bytes is None else "; " + words.format(size_words(limit_bytes))


def _rates(options: HostOptions) -> str:
    parts = [
        f"{rate * 8 / 1e6:g} Mbit/s {way}"
        for way, rate in (("up", options.up_bytes_per_s), ("down", options.down_bytes_per_s))
        if rate is not None
    ]
    return f"; at most {' and '.join(parts)}" if parts else ""


def _text(run_file: RunFile, data: str | None) -> str:
    from node.data.download import WIKITEXT_2, WIKITEXT_103

    if data is not None:
        return f"your own, {data}: what updates can tell of it is in docs/host-guide.md"
    spec = run_file.data.spec
    archives = {"wikitext-2": WIKITEXT_2, "wikitext-103": WIKITEXT_103}
    if spec in archives:
        one = archives[spec]
        whole = sum(member.max_bytes for member in one.members)
        packed = size_words(one.size_bytes)
        return f"{spec}: {packed} downloaded once, up to {size_words(whole)} on disk"
    if spec == "own":
        return "your own: give it with --data"
    return PYTHON_TEXT
