"""Parse and check the JSON body of a completions request.

OpenAI's parameters have defaults and limits here. One that would change the text but is not
supported is refused, never ignored.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from protocol.errors import BlockswarmError
from swarm.writing.generate import Sampling

KIB = 1024
DEFAULT_LENGTH = 128
SEEDS = 2**53
INVALID, SERVER = "invalid_request_error", "server_error"

# Unsupported, but accepted with the values that change nothing, which clients send by default.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (),
    "presence_penalty": (0,),
    "suffix": ("",),
    "top_p": (1,),
}


@dataclass(frozen=True)
class Limits:
    """Limits for one request, and for all of them together."""

    body_bytes: int = 1024 * KIB
    prompt_bytes: int = 64 * KIB
    length: int = 4096  # of an output, in bytes
    outputs: int = 16  # of a request: prompts x n
    stops: int = 4
    stop_bytes: int = 256
    at_once: int = 64  # outputs being written, in all requests
    request_s: float = 120.0  # for a whole answer
    body_s: float = 10.0  # for a request's body to arrive
    idle_s: float = 30.0  # for its header to arrive, and between two requests
    connections: int = 256


class ApiError(BlockswarmError):
    """An error with an HTTP status, sent in the form of OpenAI's errors."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = INVALID,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.kind = status, code, param, kind
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        said = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": said}


@dataclass(frozen=True)
class Wanted:
    """A checked request. Output `prompt * n + k` is the k-th of a prompt."""

    prompts: tuple[bytes, ...]
    n: int
    length: int
    samplings: tuple[Sampling, ...]  # one for each of the n
    stops: tuple[bytes, ...]
    stream: bool
    include_usage: bool

    @property
    def outputs(self) -> int:
        return len(self.prompts) * self.n


def parse_request(body: bytes, model: str, limits: Limits) -> Wanted:
    """Read a request for completions. Raises `ApiError`."""
    fields = _Fields(_json(body))
    asked = fields.take("model")
    if not isinstance(asked, str):
        _refuse("model", "model must be the name of a model; GET /v1/models has it")
    if asked != model:
        raise unknown_model(asked)
    prompts = _prompts(fields, limits)
    n = fields.integer("n", 1, 1, limits.outputs)
    if len(prompts) * n > limits.outputs:
        _refuse("n", f"{len(prompts)} prompts x n {n} are more than {limits.outputs} outputs")
    wanted = Wanted(
        prompts=prompts,
        n=n,
        length=fields.integer("max_tokens", min(DEFAULT_LENGTH, limits.length), 1, limits.length),
        samplings=_samplings(fields, n),
        stops=_stops(fields, limits),
        stream=fields.flag("stream"),
        include_usage=_include_usage(fields),
    )
    fields.take("user")  # accepted and ignored
    fields.nothing_left()
    return wanted


def unknown_model(name: str) -> ApiError:
    message = f"there is no model {name[:64]!r} here; GET /v1/models lists what there is"
    return ApiError(404, message, code="model_not_found", param="model")


class _Fields:
    """The fields of a body, taken out one by one. null is the same as absent."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.left = dict(fields)

    def take(self, name: str) -> Any:
        return self.left.pop(name, None)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.take(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:  # True is no number
            _refuse(name, f"{name} must be an integer between {low} and {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high:
            _refuse(name, f"{name} must be a number between {low:g} and {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            _refuse(name, f"{name} must be true or false")
        return bool(value)

    def nothing_left(self) -> None:
        for name, value in self.left.items():
            if value is None:
                continue
            if name not in NEUTRAL:
                _refuse(name[:64], f"unknown parameter {name[:64]!r}", "unknown_parameter")
            if value not in NEUTRAL[name]:
                _refuse(name, f"{name} is not supported here", "unsupported_parameter")


def _json(body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, endless numbers, too deep
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _prompts(fields: _Fields, limits: Limits) -> tuple[bytes, ...]:
    """The prompts: a text, bytes as a list of integers, or a list of either."""
    if "prompt" not in fields.left:
        _refuse("prompt", "prompt is missing")
    given = fields.take("prompt")
    if given is None:
        given = ""
    single = isinstance(given, str) or _is_bytes(given)
    each = [given] if single and given != [] else given
    if not isinstance(each, list) or not each:
        _refuse("prompt", "prompt must be a text or a list of texts")
    if len(each) > limits.outputs:
        _refuse("prompt", f"{len(each)} prompts are more than {limits.outputs}")
    return tuple(_prompt(one, limits) for one in each)


def _prompt(given: Any, limits: Limits) -> bytes:
    if isinstance(given, str):
        prompt = _utf8("prompt", given)
    elif _is_bytes(given):
        prompt = bytes(given)
    else:
        _refuse("prompt", "prompt must be a text, a list of texts, or bytes as integers 0 to 255")
    if len(prompt) > limits.prompt_bytes:
        long = f"the prompt has {len(prompt)} bytes; at most {limits.prompt_bytes} are taken"
        _refuse("prompt", long, "context_length_exceeded")
    return prompt


def _is_bytes(given: Any) -> bool:
    """Whether it is a list of bytes: OpenAI's form for tokens, which are bytes here."""
    return isinstance(given, list) and all(type(b) is int and 0 <= b < 256 for b in given)


def _samplings(fields: _Fields, n: int) -> tuple[Sampling, ...]:
    temperature = fields.number("temperature", 1.0, 0.0, 2.0)
    top_k = fields.integer("top_k", 0, 0, 256)
    seed = fields.integer("seed", secrets.randbelow(SEEDS), -(2**63), 2**63 - 1)
    return tuple(Sampling(temperature, top_k, (seed + k) % SEEDS) for k in range(n))


def _stops(fields: _Fields, limits: Limits) -> tuple[bytes, ...]:
    given = fields.take("stop")
    each = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(each, list) or not all(isinstance(stop, str) and stop for stop in each):
        _refuse("stop", "stop must be a text or a list of texts, none of them empty")
    if len(each) > limits.stops:
        _refuse("stop", f"{len(each)} stop sequences are more than {limits.stops}")
    stops = tuple(_utf8("stop", stop) for stop in each)
    if any(len(stop) > limits.stop_bytes for stop in stops):
        _refuse("stop", f"a stop sequence has more than {limits.stop_bytes} bytes")
    return stops


def _include_usage(fields: _Fields) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        _refuse("stream_options", "stream_options must be an object with include_usage")
    return bool(options.get("include_usage", False))


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        _refuse(name, f"{name} is not valid Unicode")


def _refuse(param: str, message: str, code: str | None = None) -> NoReturn:
    raise ApiError(400, message, code=code, param=param)
