"""HTTP answers and errors: OpenAI's JSON, server-sent events, status codes."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from typing import Any

from aiohttp import web

from node.gateway.outputs import SaidTokens
from node.gateway.request import INVALID, SERVER, ApiError, Limits, Wanted
from protocol.errors import BlockswarmError, UsageError

Facts = dict[str, Any]

LAST_WORDS_S = 1.0  # to send an error at the end of a stream
RETRY_DOWN_S = 5
DONE = b"data: [DONE]\n\n"

log = logging.getLogger("blockswarm.gateway")


class HttpReply:
    """Builds the JSON of one request's answer, and sums up its cost in `facts`."""

    def __init__(self, model: str, wanted: Wanted, facts: Facts) -> None:
        self.wanted, self.facts = wanted, facts
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.facts["prompt_bytes"] = sum(map(len, wanted.prompts))
        self.facts |= {"completion_bytes": 0, "traversals": 0, "failures": 0}

    def choice(self, said: SaidTokens) -> Facts:
        choice: Facts = {
            "index": said.index,
            "text": said.text,
            "logprobs": None,
            "finish_reason": said.finish,
        }
        if said.figures is not None:
            choice["blockswarm"] = said.figures
            self.facts["completion_bytes"] += said.size_bytes
            self.facts["traversals"] += said.figures["traversals"]
            self.facts["failures"] += said.figures["failures"]
            self.facts["missing_blocks"] = said.figures["missing_blocks"]
        return choice

    def body(self, choices: list[Facts], usage: Facts | None = None) -> Facts:
        return {**self.head, "choices": choices, **({} if usage is None else {"usage": usage})}

    def usage(self) -> Facts:
        """Token counts; a token of this model is a byte."""
        prompt, completion = self.facts["prompt_bytes"], self.facts["completion_bytes"]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


# Streams.


async def event_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_type = "text/event-stream"
    response.headers["Cache-Control"] = "no-cache"
    await response.prepare(request)
    return response


def event(body: Facts) -> bytes:
    """A server-sent event in ASCII: some readers break lines at other Unicode characters too."""
    return b"data: " + json.dumps(body).encode("ascii") + b"\n\n"


async def last_words(request: web.Request, response: web.StreamResponse, error: ApiError) -> None:
    """End a stream with an error; abort the connection if the client does not read it in time."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await response.write(event(error.body()))
            await response.write_eof()
    except OSError:  # TimeoutError is one
        if request.transport is not None:
            request.transport.abort()


# Errors.


def error_response(error: ApiError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error.body(), status=error.status, headers=headers)


def api_error(error: Exception) -> ApiError:
    """An exception as an answer for the client. Unexpected ones are logged for the operator."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return ApiError(400, error.message)
    if isinstance(error, BlockswarmError):
        return down(f"the swarm does not answer: {error.message}")
    log.error("a bug in the gateway", exc_info=error)
    return ApiError(500, "something is wrong in the gateway; its log says what", kind=SERVER)


def http_error(error: web.HTTPException, request: web.Request, limits: Limits) -> ApiError:
    """An error of the HTTP library as ours."""
    if error.status == 413:
        return too_large(limits)
    if error.status == 404:
        return ApiError(404, "there is nothing here; see GET /v1/models", code="unknown_url")
    if error.status == 405:
        return ApiError(405, f"{request.method} does not work here", code="method_not_allowed")
    return ApiError(error.status, error.reason, kind=INVALID if error.status < 500 else SERVER)


def unreadable(status: int) -> ApiError:
    """The answer to malformed HTTP. The library's message is not used: it quotes the request."""
    if status < 500:
        return ApiError(status, "this request is not HTTP that can be read here")
    return ApiError(status, "something is wrong in the gateway; its log says what", kind=SERVER)


def turned_away() -> bytes:
    """A complete HTTP answer, as bytes, for a connection beyond the limit."""
    error = down("too many connections are open; come back in a moment")
    body = json.dumps(error.body()).encode("ascii")
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Retry-After: {error.retry_after_s}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def down(message: str) -> ApiError:
    return ApiError(503, message, code="unavailable", kind=SERVER, retry_after_s=RETRY_DOWN_S)


def too_late(limits: Limits) -> ApiError:
    message = f"it took longer than {limits.request_s:g} s; ask for less, or again later"
    return ApiError(504, message, code="timeout", kind=SERVER)


def too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body has more than {limits.body_bytes} bytes", code="too_large")
