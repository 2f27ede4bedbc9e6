"""What the gateway makes of a request's body and of a model's bytes: anybody's JSON, any bytes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.gateway.request import DEFAULT_LENGTH, ApiError, Limits, Wanted, parse_request
from node.gateway.text import TextStream
from swarm.writing.generate import Sampling

LIMITS = Limits(prompt_bytes=100, length=200, outputs=6)


def parsed(**fields: Any) -> Wanted:
    body = {"model": "m", "prompt": "abc", **fields}
    return parse_request(json.dumps(body).encode(), "m", LIMITS)


def test_defaults() -> None:
    wanted = parsed()
    assert wanted.prompts == (b"abc",) and wanted.outputs == 1
    assert wanted.length == DEFAULT_LENGTH and wanted.stops == ()
    assert not wanted.stream and not wanted.include_usage
    assert wanted.samplings[0].temperature == 1.0 and wanted.samplings[0].top_k == 0
    assert parsed().samplings != wanted.samplings, "another seed every time"


def test_all_that_can_be_asked() -> None:
    wanted = parsed(
        prompt=["ä", "b"],
        max_tokens=7,
        n=3,
        temperature=0,
        top_k=5,
        seed=-1,
        stop=["\n", "end"],
        stream=True,
        stream_options={"include_usage": True},
        user="someone",
        best_of=1,
        echo=False,
        top_p=1.0,
        logprobs=None,
        logit_bias={},
        frequency_penalty=0.0,
        presence_penalty=0,
        suffix=None,
    )
    assert wanted.prompts == ("ä".encode(), b"b") and wanted.outputs == 6 and wanted.length == 7
    assert wanted.samplings[1] == Sampling(0.0, 5, 0), "seeds count on from the one that was given"
    assert len({s.seed for s in wanted.samplings}) == 3
    assert wanted.stops == (b"\n", b"end") and wanted.stream and wanted.include_usage


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", (b"",)),
        (None, (b"",)),
        (["one"], (b"one",)),
        ([0, 255], (b"\x00\xff",)),
        ([[1, 2], [3]], (b"\x01\x02", b"\x03")),
        (["a" * 100], (b"a" * 100,)),
    ],
)
def test_prompts(prompt: Any, prompts: tuple[bytes, ...]) -> None:
    assert parsed(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", "a" * 101),
        ("prompt", "ä" * 51),
        ("prompt", []),
        ("prompt", 3),
        ("prompt", {"a": 1}),
        ("prompt", ["a", 1]),
        ("prompt", [256]),
        ("prompt", [-1]),
        ("prompt", [True]),
        ("prompt", [1.0]),
        ("prompt", ["a"] * 7),
        ("prompt", "\ud800"),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 201),
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", 1e999),
        ("top_k", 257),
        ("top_k", -1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("n", 0),
        ("n", 7),
        ("stop", ["a"] * 5),
        ("stop", ""),
        ("stop", [1]),
        ("stop", "a" * 257),
        ("stop", "\udfff"),
        ("stream", "yes"),
        ("stream_options", True),
        ("stream_options", {"include_usage": 1}),
        ("model", None),
        ("model", 5),
        ("best_of", 2),
        ("echo", True),
        ("logprobs", 0),
        ("logprobs", 5),
        ("logit_bias", {"50256": -100}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("suffix", "end"),
        ("top_p", 0.9),
        ("messages", []),
        ("no_such_thing", 1),
    ],
)
def test_what_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(**{field: value})
    assert caught.value.status == 400
    said = caught.value.body()["error"]
    assert said["type"] == "invalid_request_error" and said["message"]
    assert said["param"] in (field, None)


def test_prompts_times_n() -> None:
    assert parsed(prompt=["a", "b"], n=3).outputs == 6
    with pytest.raises(ApiError, match="6 outputs"):
        parsed(prompt=["a", "b"], n=4)


def test_other_models() -> None:
    with pytest.raises(ApiError) as caught:
        parsed(model="gpt")
    assert caught.value.status == 404 and caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "m", "prompt": "a", "temperature": Infinity}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 10_000 + b"}",
        b'{"model": "m"}',
    ],
)
def test_bodies_that_are_none(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(body, "m", LIMITS)
    assert caught.value.status == 400


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
names = st.sampled_from(
    ["prompt", "max_tokens", "n", "stop", "temperature", "seed", "stream", "top_k", "echo", "x"]
)


@given(st.dictionaries(names, values, max_size=5))
def test_any_json_is_read_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(ApiError):
        wanted = parsed(**fields)
        assert 1 <= wanted.outputs <= LIMITS.outputs and 1 <= wanted.length <= LIMITS.length
        assert all(len(prompt) <= LIMITS.prompt_bytes for prompt in wanted.prompts)


@given(st.binary(max_size=600))
def test_any_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse_request(body, "m", LIMITS)


# Text.


def told(pieces: list[bytes], stops: tuple[bytes, ...] = ()) -> tuple[list[str], TextStream]:
    text = TextStream(stops)
    said = [text.add(piece) for piece in pieces]
    return [*said, text.end()], text


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


def test_characters_are_never_cut() -> None:
    data = "a é € 😀 z".encode()
    said, text = told([bytes([b]) for b in data])
    assert "".join(said) == data.decode() and "\ufffd" not in "".join(said)
    assert text.size_bytes == len(data)
    assert told(["😀".encode()[:3]])[0] == ["", "\ufffd"]
    assert "".join(told([b"\xff", b"a", b"\xc3", b"a"])[0]) == "\ufffda\ufffda"


def test_stop_sequences_are_not_said() -> None:
    said, text = told([b"one e", b"n", b"d two"], (b"end",))
    assert said == ["one ", "", "", ""] and text.stopped and text.size_bytes == 7
    said, text = told([b"one e", b"n"], (b"end",))
    assert "".join(said) == "one en" and not text.stopped and text.size_bytes == 6
    assert "".join(told([b"abcd"], (b"abcd", b"bc"))[0]) == "a", "what is complete first counts"
    assert "".join(told([b"abc"], (b"bc", b"abc"))[0]) == "", "of two that end together the longer"
    assert told([b"x\xc3", b"\n"], (b"\n",))[0] == ["x", "\ufffd", ""]


ends = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3)


@given(st.binary(max_size=40) | st.text("ab€", max_size=30).map(str.encode), st.data())
def test_text_does_not_depend_on_the_pieces(data: bytes, draw: st.DataObject) -> None:
    stops = tuple(stop.encode() for stop in draw.draw(ends))
    sizes = draw.draw(st.lists(st.integers(0, 5), max_size=20))
    said, text = told(cut(data, sizes), stops)
    found = [(at + len(s), at) for s in stops if (at := data.find(s)) >= 0]
    end, begin = min(found, default=(len(data), len(data)))
    assert "".join(said) == data[:begin].decode(errors="replace")
    assert text.stopped == bool(found) and text.size_bytes == end
