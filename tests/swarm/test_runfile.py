"""The run file: what is accepted, and what a stranger's text cannot do."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from protocol.errors import UsageError
from protocol.frames import content_digest
from protocol.limits import LOG_ENTRIES_PER_REPLY
from protocol.log import Entry, genesis
from swarm.consensus.log import ConsensusLog
from swarm.run import Coupling, ModelShape, Noise, Objective, Run, Training
from swarm.run_template import PRESETS, emit, preset
from swarm.runfile import (
    MAX_LINE_BYTES,
    MAX_SNAPSHOT_EVERY,
    MAX_TEXT_BYTES,
    DataName,
    DataRules,
    ExchangeRules,
    RoundSchedule,
    RunFile,
    RunFileError,
    parse,
    run_id,
    with_start,
)

TINY = preset("tiny", "tiny")
TEXT = emit(TINY).decode()
FIELDS = [
    line.partition(" = ")[0] for line in TEXT.splitlines() if " = " in line and line[0] != "#"
]


def with_value(field: str, value: str, text: str = TEXT) -> bytes:
    """The text with one field's value replaced."""
    lines = [
        f"{field} = {value}" if line.startswith(f"{field} = ") else line
        for line in text.splitlines()
    ]
    return "\n".join(lines).encode()


def small_floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


@st.composite
def runfiles(draw: st.DrawFn) -> RunFile:
    """Any run file of moderate size."""
    heads = draw(st.integers(1, 8))
    objective = draw(st.sampled_from(get_args(Objective)))
    couplings = get_args(Coupling) if objective != "edm" else ("independent",)
    shape = ModelShape(
        blocks=draw(st.integers(1, 12)),
        layers=draw(st.integers(1, 8)),
        width=heads * 2 * draw(st.integers(4, 64)),
        heads=heads,
        context=draw(st.integers(2, 2048)),
        coupling=draw(st.sampled_from(couplings)),
    )
    sigma_min = draw(small_floats(0.01, 20))
    try:
        noise = Noise(
            sigma_min=sigma_min,
            sigma_max=sigma_min * draw(small_floats(1.5, 50)),
            p_mean=draw(small_floats(-2, 2)),
            p_std=draw(small_floats(1, 3)),
            overlap=draw(small_floats(0, 1)),
            leak_limit_nats=draw(small_floats(1e-6, 5)),
        )
    except UsageError:  # sigmas that the lognormal almost never gives
        reject()
    period_s = draw(small_floats(1, 86400))
    share = draw(small_floats(0.02, 0.16))
    rounds = RoundSchedule(
        start_s=draw(st.integers(0, 10**10)),
        period_s=period_s,
        count=draw(st.integers(1, 10**5)),
        deadline_floor_s=period_s * share / 2,
        deadline_ceiling_s=period_s * share,
        vote_window_s=period_s * share,
        repair_window_s=period_s * share,
    )
    training = Training(
        objective=objective,
        steps_per_round=draw(st.integers(1, 5000)),
        batch=draw(st.integers(1, 64)),
        learning_rate=draw(small_floats(1e-9, 1)),
        final_learning_rate=draw(small_floats(0, 1)),
        warmup_steps=draw(st.integers(0, 10**6)),
        weight_decay=draw(small_floats(0, 1)),
        beta1=draw(small_floats(0, 0.999)),
        beta2=draw(small_floats(0, 0.999)),
        clip_norm=draw(small_floats(1e-3, 1e6)),
        look_ahead_weight=draw(small_floats(0, 100)),
        staggered=draw(st.booleans()),
        copy_steps=draw(small_floats(1, 999)),
        ahead_learns=draw(st.booleans()),
        replica_power=draw(small_floats(0, 1)),
    )
    training = replace(training, steps=rounds.count * training.steps_per_round)
    spec = draw(st.sampled_from(get_args(DataName)))
    sha256 = "" if spec == "own" else draw(st.sampled_from(["", "0a" * 32]))
    codec = draw(st.sampled_from(["topk:0.02:2:overall", "topk:5e-3:4:1024", "int8+zstd", "fp32"]))
    exchange = ExchangeRules(
        codec,
        draw(st.integers(12, MAX_SNAPSHOT_EVERY)),
        draw(st.integers(1, 1024)),
        draw(small_floats(0, 16)),
    )
    name = draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,47}", fullmatch=True))
    run = Run(shape, noise, training, draw(st.integers(0, 2**32 - 1)))
    return RunFile(name, run, DataRules(spec, sha256), rounds, exchange)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runfiles())
def test_what_is_written_is_read_back(runfile: RunFile) -> None:
    text = emit(runfile)
    assert parse(text) == runfile
    if not runfile.started:
        return
    unstarted = emit(replace(runfile, rounds=replace(runfile.rounds, start_s=0)))
    assert with_start(unstarted, runfile.rounds.start_s) == text


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_read_back(name: str) -> None:
    runfile = preset(name, "Some run-1.0_x", seed=7)
    assert parse(emit(runfile)) == runfile
    assert not runfile.started
    steps = runfile.rounds.count * runfile.run.training.steps_per_round
    assert runfile.run.training.steps == steps


def test_steps_follow_from_the_rounds() -> None:
    with pytest.raises(RunFileError, match="steps"):
        replace(TINY, rounds=replace(TINY.rounds, count=301))


# What is refused


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(field: str) -> None:
    lines = [line for line in TEXT.splitlines() if not line.startswith(f"{field} = ")]
    with pytest.raises(RunFileError, match=f"missing in .*: {field}$"):
        parse("\n".join(lines).encode())


BAD_VALUES = [
    *("nan", "inf", "-inf", "-1", "-1.5", "true", '"?"', '""', "[]", "{}", "1979-05-27"),
    *("9" * 30, "0x" + "f" * 60, "1e400", "1e308", "9223372036854775807", "99999999999"),
]


@pytest.mark.parametrize("field", FIELDS)
def test_no_value_of_a_field_does_harm(field: str) -> None:
    """Refused with a `RunFileError`, or, where the value makes sense, accepted and not NaN."""
    errors, accepted = [], []
    for value in BAD_VALUES:
        try:
            parse(with_value(field, value))
        except RunFileError as error:
            errors.append(error)
        else:
            accepted.append(value)
    assert not {"nan", "inf", "-inf", "[]", "{}", "1e400", "9" * 30} & set(accepted)
    assert len(errors) >= 10
    assert all(len(error.message) < 400 and error.hint for error in errors)


@pytest.mark.parametrize("field", ["blocks", "seed", "batch", "count", "start_s", "min_replicas"])
@pytest.mark.parametrize("value", ["true", "2.0", '"2"'])
def test_integers_are_integers(field: str, value: str) -> None:
    with pytest.raises(RunFileError, match=f"{field}: Expected int"):
        parse(with_value(field, value))


def test_a_whole_number_may_stand_for_a_float() -> None:
    period_s = parse(with_value("period_s", "20")).rounds.period_s
    assert period_s == 20.0 and type(period_s) is float


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[model]", "[model]\nbogus = 1", "unknown field in .model.: 'bogus'"),
        ("[data]", "[bogus]\nx = 1\n[data]", "unknown field in the run file: 'bogus'"),
        ("[training]", "[training]\nsteps = 5", "unknown field in .training.: 'steps'"),
        ("[model]", "[limits]", "unknown field in the run file: 'limits'"),
        ("[model]", "[[model]]", "write .model."),
        ("format = 2", "format = 3", "newer blockswarm"),
        ("format = 2", "format = 1", "of an older version: format 1, where 2 is needed"),
        ("format = 2", 'format = "1"', "format must be 2"),
        ("seed = 0", "seed = 4294967296", "seed is 4294967296"),
        ('name = "tiny"', 'name = "a\\u001b[2Jb"', "name must be"),
        ('name = "tiny"', 'name = ""', "name must be"),
        ("width = 128", "width = 130", "does not split"),
        ('spec = "python"', 'spec = "/etc/passwd"', "data.spec is .* must be one of python"),
        ('sha256 = ""', 'sha256 = "ABC"', "64 lowercase hex"),
        ('codec = "topk:0.133:2:overall"', 'codec = "topk:0:2"', "density"),
        ('codec = "topk:0.133:2:overall"', 'codec = "pickle"', "unknown codec"),
        ("period_s = 4.0", "period_s = 3.0", "does not fit into 3.0 s"),
        ("vote_window_s = 0.4", "vote_window_s = 2.0", "does not fit into 4.0 s"),
        ("deadline_floor_s = 0.4", "deadline_floor_s = 5.0", "deadline_floor_s is 5.0"),
        ("snapshot_every = 32", "snapshot_every = 3", "below model.blocks"),
        ("snapshot_every = 32", "snapshot_every = 129", "newcomers would find no snapshot"),
        ("snapshot_every = 32", "snapshot_every = 0", "snapshot_every is 0"),
        ('objective = "bayes"', 'objective = "edm"', "independent blocks only"),
    ],
)
def test_refusals_say_why(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(RunFileError, match=message) as caught:
        parse(TEXT.replace(old, new, 1).encode())
    assert caught.value.hint


def test_both_snapshots_are_within_reach_of_a_log_reply() -> None:
    """Also in the round before the next snapshot: its older one is then the farthest back."""
    log = ConsensusLog((genesis("run", 0, bytes(32)),), MAX_SNAPSHOT_EVERY)
    for number in range(3 * MAX_SNAPSHOT_EVERY):
        log = log.appended(Entry(number, log.head.digest, bytes(32), bytes(32), 0, ()))
    sent = log.entries[-LOG_ENTRIES_PER_REPLY:]
    older, newer = log.pinned()
    assert newer.round - older.round == MAX_SNAPSHOT_EVERY
    assert older in sent and newer in sent


def test_own_text_has_no_common_hash() -> None:
    with pytest.raises(RunFileError, match="their own text"):
        DataRules("own", "0a" * 32)


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("parameters of a block", {"layers": 256, "width": 32768}),
        ("parameters of the model", {"blocks": 256, "layers": 4, "width": 2048}),
        ("memory", {"context": 1 << 17, "batch": 1 << 16}),
        ("update", {"layers": 12, "width": 3584, "codec": '"fp32"'}),
    ],
)
def test_a_giant_is_refused_before_anything_is_made(what: str, changes: dict[str, Any]) -> None:
    text = with_value("snapshot_every", "128").decode()
    for field, value in changes.items():
        text = with_value(field, str(value), text).decode()
    with pytest.raises(RunFileError, match=f"{what}.* must be between 1 and"):
        parse(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"\x00",
        b"a" * (MAX_TEXT_BYTES + 1),
        ("\n" * (MAX_TEXT_BYTES + 1)).encode(),
        b"a." * 30000 + b"a = 1",  # 40 s in tomllib
        b"[" + b"a." * 30000 + b"a]",
        b"a = " + b"[" * 150,
        b"a = [\n" + b"[\n" * 20000,
        b"a = " + b"9" * 5000,
        b"a = [\n" + b"{a.a.a.a.a.a.a=1},\n" * 3000 + b"]",
        b"[x" + b".a" * 70 + b"]\n" + b"\n".join(b"a." * 70 + b"k%d = 1" % i for i in range(430)),
    ],
)
def test_hostile_texts_end_soon(text: bytes) -> None:
    started = time.process_time()
    with pytest.raises(RunFileError) as caught:
        parse(text)
    assert len(caught.value.message) < 400
    assert time.process_time() - started < 10  # the last takes 1 s; without the limits, 40 s


def test_a_long_line_is_named() -> None:
    with pytest.raises(RunFileError, match="line 2 is longer"):
        parse(b"format = 2\n# " + b"x" * MAX_LINE_BYTES)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(text: bytes) -> None:
    with pytest.raises(RunFileError):
        parse(text)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(TEXT) - 1), st.binary(max_size=6), st.integers(0, 12))
def test_damaged_files_are_read_or_refused(at: int, put: bytes, drop: int) -> None:
    raw = TEXT.encode()
    with suppress(RunFileError):  # and nothing else
        parse(raw[:at] + put + raw[at + drop :])


# The name of a run and its start


def test_the_name_is_of_the_exact_bytes() -> None:
    text = TEXT.encode()
    assert run_id(text) == content_digest(text) and len(run_id(text)) == 32
    assert parse(text + b"# more\n") == parse(text)
    assert run_id(text + b"# more\n") != run_id(text)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_only_the_start_changes(newline: str) -> None:
    text = TEXT.replace("start_s = 0", "\tstart_s=0  # soon", 1).replace("\n", newline).encode()
    started = with_start(text, 1_800_000_000)
    assert started.replace(b"start_s=1800000000", b"start_s=0") == text
    assert parse(started).rounds.rules().start_s == 1.8e9
    with pytest.raises(RunFileError, match="started already"):
        with_start(started, 1_800_000_001)


@pytest.mark.parametrize("start_s", [0, -5, 10**13])
def test_impossible_starts(start_s: int) -> None:
    if start_s == 0:
        assert with_start(TEXT.encode(), 0) == TEXT.encode()
        return
    with pytest.raises(RunFileError):
        with_start(TEXT.encode(), start_s)


def test_a_start_that_cannot_be_found() -> None:
    lines = [line for line in TEXT.splitlines() if not line.startswith("start_s")]
    dotted = "\n".join(lines).replace("[rounds]", "[rounds]\n'start_s' = 0").encode()
    assert parse(dotted) == TINY
    with pytest.raises(RunFileError, match="cannot fill in"):
        with_start(dotted, 1_800_000_000)
