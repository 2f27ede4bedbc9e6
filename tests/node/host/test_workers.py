"""Several workers of one host: what each is told, and that one's end is nobody else's.

The supervisor is the real one; its workers are small programs that do as they are told.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.commands.swarm import join
from node.host import host, workers
from node.host.fleet import FoundRun, _commands, _hosts, blocks_for, saved_block
from node.host.live_line import RunTimes
from node.host.options import HostOptions
from node.host.taking_part import Part, _host_settings, network_settings
from node.host.workers import (
    Supervisor,
    WorkersError,
    command_of,
    worker_home,
)
from node.network.gate import Backoff
from protocol.errors import UsageError, WireError
from protocol.records import Role
from swarm.cost import worker_memory_bytes
from swarm.events import NodeEvent, to_dict
from swarm.run_template import emit, preset
from swarm.runfile import with_start

OPTIONS = HostOptions(
    port=4001,
    announce=("203.0.113.7",),
    threads=8,
    max_memory=8.0,
    max_gb_per_day=10.0,
    up_mbps=100.0,
    as_json=True,
)
TIMES = RunTimes(0.0, 10.0, 100)
QUICK = Backoff(first_s=0.05, most_s=0.2)
LIMIT_S = 60.0


# What each is told.


def test_the_command_of_a_worker_is_one_that_we_understand(tmp_path: Path) -> None:
    shared = replace(OPTIONS.shared(2, 1, cores=8), first_block=3)
    command = command_of(["/ip4/1.2.3.4/tcp/1/p2p/x"], tmp_path, 1, shared)
    assert command[1:4] == ["-m", "node.cli", "join"]
    parsed = join.make_context("join", command[4:]).params
    assert parsed["as_worker"] == 2 and parsed["folder"] == worker_home(tmp_path, 1)
    assert parsed["as_json"] and parsed["port"] == 4002
    assert parsed["first_block"] == 3 and parsed["block"] is None, "it may move from there"
    assert parsed["max_memory"] == 4.0 and parsed["announce"] == ("203.0.113.7",)
    assert "--verbose" not in shared.arguments()


# Which block.


def test_blocks_of_new_and_of_returning_workers(tmp_path: Path) -> None:
    run = preset("tiny", "x")
    found = FoundRun(emit(run), (2, 0, 1, 0))
    assert sorted(blocks_for(tmp_path, 2, None, found, run)) == [1, 3]
    assert sorted(blocks_for(tmp_path, 4, None, found, run)) == [0, 1, 2, 3]
    worker_home(tmp_path, 1).mkdir()
    (worker_home(tmp_path, 1) / "state.json").write_text(json.dumps({"block": 3}))
    chosen = blocks_for(tmp_path, 3, None, found, run)
    assert chosen[1] == 3 and len(set(chosen)) == 3
    # Six workers on four blocks: two of them twice, and not one of them three times.
    assert sorted(map(blocks_for(tmp_path, 6, None, found, run).count, range(4))) == [1, 1, 2, 2]


def test_only_hosts_that_train_now_count() -> None:
    """By the same rule as for a host that chooses for itself."""
    run = preset("tiny", "x")
    run = replace(run, rounds=replace(run.rounds, start_s=1000))
    now_s = 1000 + 20.5 * run.rounds.period_s
    roles = {b"a": (Role.REPLICA, 20), b"b": (Role.SERVER, 20), b"dead": (Role.REPLICA, 4)}

    class Fake:
        peer_id = b"us"

        async def replicas(self, block: int, cap: int = 0) -> list[Any]:
            if block == 3:
                raise WireError("nobody answers")
            return [
                SimpleNamespace(peer_id=peer, record=SimpleNamespace(role=int(role), round=number))
                for peer, (role, number) in roles.items()
                if block == 0
            ]

    found = asyncio.run(_hosts(cast(Any, Fake()), run, now_s))
    assert found == (1, 0, 0, 0)


def test_a_worker_begins_with_its_block_and_may_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = preset("tiny", "x")
    text = with_start(emit(run), 1000)
    commands = _commands((), tmp_path, [3, 1], OPTIONS, text)
    parsed = join.make_context("join", [*commands[0][4:], "/ip4/1.2.3.4"]).params
    known = {field.name for field in fields(HostOptions)}
    typed = HostOptions(**{name: value for name, value in parsed.items() if name in known})
    part = Part(text, tmp_path, (), False, typed)
    settings = _host_settings(part, network_settings(part))
    assert (settings.block, settings.first_block) == (None, 3)

    wanted: list[object] = []

    async def choose(network: object, run_file: object, block: object, *more: object) -> int:
        wanted.append(block)
        return 3

    monkeypatch.setattr(host, "choose_block", choose)
    new = host.Host(settings, lambda line: None)
    assert asyncio.run(new._choose_block()) == 3 and wanted == [3]


def test_more_workers_than_fit(tmp_path: Path) -> None:
    run = preset("tiny", "x")
    one = worker_memory_bytes(run)
    found = FoundRun(emit(run), (0, 0, 0, 0))
    assert len(blocks_for(tmp_path, 2, round(2.1 * one), found, run)) == 2
    with pytest.raises(UsageError, match="2 workers need"):
        blocks_for(tmp_path, 2, one, found, run)


@pytest.mark.parametrize("rubbish", ["", "[", '{"block": "1"}', '{"block": -1}', "7"])
def test_a_state_that_cannot_be_read(tmp_path: Path, rubbish: str) -> None:
    (tmp_path / "state.json").write_text(rubbish)
    assert saved_block(tmp_path) is None


# Looking after them.

EVENT = json.dumps(to_dict(NodeEvent(1.0, "me", "started")))
STAY = f"print({EVENT!r}, flush=True); import sys; sys.stdin.read()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
STUBBORN = f"{DEAF}; {STAY}; import time; time.sleep(600)"


def crash(marker: Path) -> str:
    """A worker that begins, notes that it did, and ends badly."""
    note = f"file = open({str(marker)!r}, 'a'); file.write('x'); file.close()"
    return f"print({EVENT!r}, flush=True); {note}; import os; os._exit(9)"


def supervisor(*programs: str, **more: Any) -> Supervisor:
    commands = [[sys.executable, "-c", program] for program in programs]
    return Supervisor(commands, range(len(commands)), TIMES, backoff=QUICK, **more)


async def until(condition: Callable[[], bool], task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            if task.done():
                task.result()
                raise AssertionError("the supervisor has ended")
            await asyncio.sleep(0.02)  # between two looks


async def ended(task: asyncio.Task[None]) -> float:
    began_s = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return time.monotonic() - began_s


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_one_crash_does_not_stop_the_others(tmp_path: Path) -> None:
    marker = tmp_path / "lives"

    async def scenario() -> None:
        fleet = supervisor(STAY, crash(marker))
        task = asyncio.create_task(fleet.run())
        await until(lambda: marker.exists() and len(marker.read_text()) >= 3, task)
        first = fleet.workers[0]
        assert first.process is not None and first.process.returncode is None and first.began
        pid = first.process.pid
        await ended(task)
        assert gone(pid)

    asyncio.run(scenario())


def test_one_request_ends_all_of_them_and_the_stubborn_too() -> None:
    async def scenario() -> None:
        fleet = supervisor(STAY, STAY, STUBBORN)
        task = asyncio.create_task(fleet.run())
        await until(lambda: all(worker.began for worker in fleet.workers), task)
        pids = [w.process.pid for w in fleet.workers if w.process]
        seconds = await ended(task)
        assert len(pids) == 3 and all(map(gone, pids))
        assert seconds < workers.LEAVE_S + 10  # a loaded machine; the patience itself is bounded

    asyncio.run(scenario())
    assert workers.LEAVE_S < 5.0


def test_if_none_can_be_started_it_says_why() -> None:
    said = "'error: port 1 is taken\\n  try: another'"
    program = f"import sys; print({said}, file=sys.stderr); sys.exit(2)"

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S):
            await supervisor(program, program).run()

    with pytest.raises(WorkersError) as caught:
        asyncio.run(scenario())
    assert "port 1 is taken" in caught.value.message and caught.value.hint == "another"


def test_events_reach_the_output_and_rubbish_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = f"print('rubbish'); print('x' * 3000000); {STAY}"

    async def scenario() -> None:
        fleet = supervisor(program, as_json=True)
        task = asyncio.create_task(fleet.run())
        await until(lambda: fleet.workers[0].began, task)
        await ended(task)

    asyncio.run(scenario())
    assert capsys.readouterr().out.splitlines() == [EVENT]


def test_workers_hear_that_their_supervisor_is_gone() -> None:
    """Its death closes their standard input; nobody had to say anything."""

    async def scenario() -> None:
        fleet = supervisor(STAY)
        task = asyncio.create_task(fleet.run())
        await until(lambda: fleet.workers[0].began, task)
        process = fleet.workers[0].process
        assert process is not None and process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(LIMIT_S):
            assert await process.wait() == 0
        await ended(task)

    asyncio.run(scenario())
