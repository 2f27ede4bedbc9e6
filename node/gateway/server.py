"""An HTTP gateway to a serving swarm, with OpenAI's completions API.

Clients are untrusted: connections, headers, bodies, waiting times and concurrent outputs are
bounded. Parsing is `request`'s task, writing outputs `outputs`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web

from node.gateway.health import Health
from node.gateway.outputs import OutputPlan, Outputs
from node.gateway.reply import (
    DONE,
    Facts,
    HttpReply,
    api_error,
    down,
    error_response,
    event,
    event_stream,
    http_error,
    last_words,
    too_large,
    too_late,
    turned_away,
    unreadable,
)
from node.gateway.request import ApiError, Limits, parse_request, unknown_model
from node.serving.client import SweepClient
from protocol.errors import UsageError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADERS_MAX = 64
HEADER_MAX_BYTES = 8 * 1024
STOP_S = 1.5  # for open answers to end, before they are cut off
RETRY_BUSY_S = 1
CLIENT_LEFT = 499  # only in the log
FACTS = web.RequestKey("facts", dict)

_quiet = logging.getLogger("blockswarm.http")  # silences messages about malformed HTTP
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False


@dataclass(frozen=True)
class GatewaySettings:
    """The operator's settings. `model` is the id that clients ask for; port 0 is any free one."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = field(default=None, repr=False)
    plan: OutputPlan = field(default_factory=OutputPlan)
    limits: Limits = field(default_factory=Limits)


class Gateway:
    """The HTTP server. `start` and `stop` it; the caller owns the client and its network."""

    def __init__(
        self,
        client: SweepClient,
        settings: GatewaySettings,
        tell: Callable[[Facts], None] = lambda facts: None,
    ) -> None:
        self.client, self.settings, self.tell = client, settings, tell
        self.limits = settings.limits
        self.writing = 0  # outputs being written, in all requests
        self._key = None if settings.key is None else _digest(settings.key)
        self._open: set[Outputs] = set()
        self._created = int(time.time())
        self.health = Health(client, settings.model)
        self._server: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(middlewares=[self._answer], client_max_size=self.limits.body_bytes)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._model)
        app.router.add_get("/health", self._show_health)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=STOP_S, **self._line_settings()
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        host, port = self.settings.host, self.settings.port
        try:
            self._server = await loop.create_server(self._connection, host, port)
        except OSError as error:
            await self._runner.cleanup()
            why = error.strerror or str(error)
            raise UsageError(
                f"cannot listen on {host} port {port}: {why}", "choose another with --port"
            ) from error
        except UnicodeError as error:  # of a name that cannot even be looked up
            await self._runner.cleanup()
            raise UsageError(
                f"{host} is neither an IP nor a name to listen on", "check --host"
            ) from error

    async def stop(self) -> None:
        """Stop listening, end open answers with an error, then close what is left."""
        if self._server is not None:
            self._server.close()
        for outputs in self._open:
            outputs.fail(down("the gateway is stopping"))
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    def _connection(self) -> asyncio.BaseProtocol:
        assert self._runner is not None and self._runner.server is not None
        server = self._runner.server
        if len(server.connections) >= self.limits.connections:
            return _Full()
        return _Line(server, loop=asyncio.get_running_loop(), **self._line_settings())

    def _line_settings(self) -> dict[str, Any]:
        """The limits of a client's connection."""
        return {
            "access_log": None,
            "logger": _quiet,
            "keepalive_timeout": self.limits.idle_s,
            "lingering_time": self.limits.body_s,
            "max_headers": HEADERS_MAX,
            "max_line_size": HEADER_MAX_BYTES,
            "max_field_size": HEADER_MAX_BYTES,
            "auto_decompress": False,  # so that a small body cannot become a large one
        }

    # --- every request --------------------------------------------------------------------------

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, call the handler, turn errors into JSON, report the request."""
        began_s = time.monotonic()
        resource = request.match_info.route.resource
        facts: Facts = {
            "event": "request",
            "method": request.method,
            "path": "unknown" if resource is None else resource.canonical,  # no text of the client
            "status": CLIENT_LEFT,
        }
        request[FACTS] = facts
        try:
            if request.path != "/health":
                self._check_key(request)
            response = await handler(request)
            facts["status"] = response.status
            return response
        except Exception as error:
            if isinstance(error, ConnectionError) and _has_left(request):
                raise
            if isinstance(error, web.HTTPException):
                error = http_error(error, request, self.limits)
            said = api_error(error)
            facts |= {"status": said.status, "error": said.message}
            return error_response(said)
        finally:
            facts["seconds"] = round(time.monotonic() - began_s, 4)
            self.tell(facts)

    def _check_key(self, request: web.Request) -> None:
        if self._key is None:
            return
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if not hmac.compare_digest(_digest(given.strip()), self._key) or kind.lower() != "bearer":
            message = "this gateway wants its API key: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")

    # --- what there is --------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_facts()]})

    async def _model(self, request: web.Request) -> web.Response:
        if request.match_info["model"] != self.settings.model:
            raise unknown_model(request.match_info["model"])
        return web.json_response(self._model_facts())

    def _model_facts(self) -> Facts:
        shape = self.client.run.model
        return {
            "id": self.settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "blockswarm",
            "run": self.client.run_id.hex(),
            "blocks": shape.blocks,
            "context_bytes": shape.context,
        }

    async def _chat(self, request: web.Request) -> web.Response:
        message = (
            f"{self.settings.model} is a base model of bytes: it continues text and was never "
            "taught to chat; use POST /v1/completions"
        )
        raise ApiError(404, message, code="not_a_chat_model")

    async def _show_health(self, request: web.Request) -> web.Response:
        health = {**await self.health.now(), "outputs_now": self.writing}
        return web.json_response(health, status=503 if health["status"] == "down" else 200)

    # --- completions ----------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        wanted = parse_request(await self._body(request), self.settings.model, self.limits)
        facts = request[FACTS]
        facts |= {"outputs": wanted.outputs, "stream": wanted.stream}
        reply = HttpReply(self.settings.model, wanted, facts)
        with self._places(wanted.outputs):
            async with Outputs(self.client, wanted, self.settings.plan) as outputs:
                self._open.add(outputs)
                try:
                    if wanted.stream:
                        return await self._stream(request, outputs, reply)
                    return await self._whole(outputs, reply)
                finally:
                    self._open.discard(outputs)

    async def _body(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            # Also blocks web pages of other sites: for this type browsers ask first, in vain.
            raise ApiError(415, "send the body as Content-Type: application/json")
        if (request.content_length or 0) > self.limits.body_bytes:
            raise too_large(self.limits)
        try:
            async with asyncio.timeout(self.limits.body_s):
                return await request.read()
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time") from None

    @contextlib.contextmanager
    def _places(self, count: int) -> Iterator[None]:
        if self.writing + count > self.limits.at_once:
            message = f"{self.writing} outputs are being written, at most {self.limits.at_once}"
            raise ApiError(
                429,
                f"{message}; come back in a moment",
                code="rate_limit_exceeded",
                kind="rate_limit_error",
                retry_after_s=RETRY_BUSY_S,
            )
        self.writing += count
        try:
            yield
        finally:
            self.writing -= count

    async def _whole(self, outputs: Outputs, reply: HttpReply) -> web.Response:
        choices: dict[int, Facts] = {}
        async with self._in_time():
            async for said in outputs.said():
                choice = reply.choice(said)
                choice["text"] = choices.get(said.index, {"text": ""})["text"] + said.text
                choices[said.index] = choice
        body = reply.body([choices[index] for index in sorted(choices)], reply.usage())
        return web.json_response(body)

    async def _stream(
        self, request: web.Request, outputs: Outputs, reply: HttpReply
    ) -> web.StreamResponse:
        """Answer with server-sent events. An error before the first piece is a plain answer."""
        response: web.StreamResponse | None = None
        try:
            async with self._in_time():
                async for said in outputs.said():
                    if response is None:
                        response = await event_stream(request)
                    await response.write(event(reply.body([reply.choice(said)])))
                assert response is not None
                if reply.wanted.include_usage:
                    await response.write(event(reply.body([], reply.usage())))
                await response.write(DONE)
                await response.write_eof()
        except Exception as error:
            if response is None or (isinstance(error, ConnectionError) and _has_left(request)):
                raise
            told = api_error(error)
            reply.facts["error"] = told.message
            await last_words(request, response, told)
        return response

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.limits.request_s):
                yield
        except TimeoutError:
            raise too_late(self.limits) from None


class _Line(web.RequestHandler):
    """A connection. Malformed HTTP never reaches our handlers; it is answered here, as JSON."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # raises if an answer is under way
        answer = error_response(unreadable(status))
        answer.force_close()
        return answer


class _Full(asyncio.Protocol):
    """A connection beyond the limit: answered with an error and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(turned_away())
        transport.close()


def _has_left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _digest(key: str) -> bytes:
    """A hash of a key, so that comparing keys in constant time does not reveal their length."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
