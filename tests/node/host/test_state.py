"""The state on disk: of one moment, whole or not there, checked when it is read back."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from node.host.state import CURRENT, DamagedState, StateError, StateFolder
from node.machine.atomic import HALF, StorageError
from node.replica.own_updates import OwnUpdate, OwnUpdates
from node.replica.running_weights import Moment
from protocol.errors import WireError
from protocol.identity import peer_text
from protocol.updates import update_digest
from protocol.votes import UpdateRef
from tests.support.chains import CODEC, EVERY, RUN, Chain, identity, trend_of
from tests.support.fixed_updates import same


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(identity(tmp_path)).grow(10)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    (tmp_path / "state").mkdir()
    return StateFolder(tmp_path / "state")


def moment_of(chain: Chain) -> Moment:
    number = chain.log.head.round + 1
    quanta = np.arange(CODEC.size, dtype=np.int64) << 10
    payload, update = CODEC.encode(quanta, 0, number, chain.identity.peer_id)
    ref = UpdateRef(update_digest(payload), peer_text(chain.identity.peer_id))
    made = OwnUpdate(number, update, payload)
    return Moment(chain.log, chain.consensus.copy(), {ref: made})


def save(folder: StateFolder, chain: Chain, block: int = 0) -> Moment:
    moment = moment_of(chain)
    path = folder.trainer_path()
    path.write_bytes(b"weights")
    folder.save(RUN, block, moment, path)
    return moment


def names(folder: StateFolder) -> list[str]:
    return sorted(path.name.split("-")[0] for path in folder.folder.iterdir())


def test_a_state_comes_back_as_it_was(folder: StateFolder, chain: Chain) -> None:
    assert folder.load(RUN) is None
    moment = save(folder, chain)
    saved = folder.load(RUN)
    assert saved is not None and saved.trainer_path.read_bytes() == b"weights"
    again = saved.restore(CODEC, EVERY, peer_text(chain.identity.peer_id))
    assert again.log == moment.log
    assert np.array_equal(again.consensus.weights, chain.consensus.weights)
    assert set(again.consensus.snapshots) == set(chain.consensus.snapshots)
    assert again.in_flight.keys() == moment.in_flight.keys()
    ref = next(iter(moment.in_flight))
    assert same(again.in_flight[ref].update, moment.in_flight[ref].update)
    ours, theirs = trend_of(again.consensus, again.log), trend_of(chain.consensus, chain.log)
    assert ours is not None and theirs is not None and same(ours, theirs)


def test_only_one_state_is_kept_and_its_snapshot_is_written_once(
    folder: StateFolder, chain: Chain
) -> None:
    save(folder, chain)
    snapshot = next(folder.folder.glob("snapshot-*"))
    written = snapshot.stat().st_mtime_ns
    save(folder, chain.grow(1))
    assert snapshot.stat().st_mtime_ns == written
    for _ in range(6):
        save(folder, chain.grow(1))
    assert names(folder) == ["log", "snapshot", "state.json", "trainer"]


def test_what_a_kill_left_half_is_removed_and_the_last_whole_state_serves(
    folder: StateFolder, chain: Chain
) -> None:
    moment = save(folder, chain)
    kept = set(folder.folder.iterdir())
    half = f".trainer-ff.safetensors.77{HALF}"
    for name in ("trainer-ff.safetensors", half, "log-aa.msgpack"):
        (folder.folder / name).write_bytes(b"half")
    saved = folder.load(RUN)
    assert saved is not None and saved.entries[-1] == moment.log.head
    StateFolder(folder.folder).remove_unnamed()
    assert set(folder.folder.iterdir()) == kept


def test_a_file_that_is_being_written_is_not_taken_for_a_rest(
    folder: StateFolder, chain: Chain
) -> None:
    path = folder.trainer_path()
    path.write_bytes(b"newer weights")
    save(folder, chain)
    assert path.exists()
    folder.give_up(path)
    assert not path.exists()


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 600 bytes: what a full disk does to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_state_before_and_no_rest(
    folder: StateFolder, chain: Chain, request: pytest.FixtureRequest
) -> None:
    moment = save(folder, chain)
    chain.grow(5)
    request.getfixturevalue("small_files")
    with pytest.raises(StorageError, match="full"):
        save(folder, chain)
    saved = folder.load(RUN)
    assert saved is not None and saved.entries[-1] == moment.log.head
    assert names(folder) == ["log", "snapshot", "state.json", "trainer"]


def test_another_run_is_refused_and_a_damaged_state_is_named(
    folder: StateFolder, chain: Chain
) -> None:
    save(folder, chain)
    with pytest.raises(StateError, match="another run"):
        folder.load(bytes(32))
    facts = json.loads((folder.folder / CURRENT).read_text())
    for name in facts["files"][1:]:
        path = folder.folder / name
        data = path.read_bytes()
        for wrong in (b"", data[: len(data) // 2], b"\xff" * 40):
            path.write_bytes(wrong)
            with pytest.raises(DamagedState):
                folder.load(RUN)
        path.unlink()
        with pytest.raises(DamagedState):
            folder.load(RUN)
        path.write_bytes(data)
    (folder.folder / CURRENT).write_bytes(b"{")
    with pytest.raises(DamagedState):
        folder.load(RUN)


def test_altered_weights_do_not_pass_the_replay(folder: StateFolder, chain: Chain) -> None:
    save(folder, chain)
    saved = folder.load(RUN)
    assert saved is not None
    me = peer_text(chain.identity.peer_id)
    with pytest.raises(WireError):
        replace(saved, start=saved.start + 1).restore(CODEC, EVERY, me)
    with pytest.raises(WireError):
        replace(saved, updates={}).restore(CODEC, EVERY, me)
    with pytest.raises(StateError):
        replace(saved, start=saved.start[:-1]).restore(CODEC, EVERY, me)
    number, payload = saved.in_flight[0]
    with pytest.raises(WireError):
        replace(saved, in_flight=[(number + 1, payload)]).restore(CODEC, EVERY, me)


def test_own_updates_are_kept_as_long_as_they_can_matter(chain: Chain) -> None:
    own = OwnUpdates()
    refs = []
    for number in range(40):
        made = OwnUpdate(number, moment_of(chain).in_flight.popitem()[1].update, b"")
        refs.append(UpdateRef(bytes([number]) * 32, "me"))
        own.add(refs[-1], made)
    head = chain.log.head.round  # 9
    own.returned(refs[20])
    assert set(own.in_flight(chain.log)) == set(refs[head + 1 :]) - {refs[20]}
    own.prune(chain.log, {refs[0]: 0})
    assert own.get(refs[0]) is not None  # in flight, however old
    assert own.get(refs[1]) is None and own.get(refs[39]) is not None
    own.keep_only(chain.log)
    assert own.get(refs[20]) is None
