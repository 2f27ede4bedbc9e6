"""The gateway before strangers: bad requests, bad connections, wrong keys, too many at once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from node.gateway.request import Limits
from protocol.errors import UsageError
from swarm.learning.composition import ComposedModel
from tests.support.gateway_door import (
    BYTEWISE,
    KEY,
    LIMIT_S,
    LONG,
    PATIENT_S,
    door,
    lonely_door,
    settled,
)
from tests.support.loopback import _no_daemon_left, run, until  # noqa: F401
from tests.support.serving_swarm import swarm


def test_bad_requests_are_answered_in_openais_form(
    tmp_path: Path, relay_model: ComposedModel
) -> None:
    good = {"model": "tiny", "prompt": "a", "max_tokens": 4}
    bad: list[tuple[Any, int, str | None]] = [
        (b"{", 400, None),
        (b"", 400, None),
        (b"x" * 20_000, 413, None),
        (good | {"model": "gpt"}, 404, "model"),
        (good | {"max_tokens": -4}, 400, "max_tokens"),
        (good | {"prompt": "a" * 5000}, 400, "prompt"),
        (good | {"n": 99}, 400, "n"),
        (good | {"echo": True}, 400, "echo"),
    ]

    async def main() -> None:
        limits = Limits(body_bytes=10_000, prompt_bytes=4096)
        async with lonely_door(tmp_path, relay_model, limits=limits) as d:
            for body, wanted, param in bad:
                status, said = await d.post(body)
                assert status == wanted, said
                assert set(said["error"]) == {"message", "type", "param", "code"}
                assert said["error"]["param"] == param
            with pytest.raises(openai.BadRequestError, match="max_tokens"):
                await d.openai.completions.create(model="tiny", prompt="a", max_tokens=-1)
            url = f"{d.root}/v1/completions"
            async with d.http.post(url, data=b"{}") as response:
                assert response.status == 415
            async with d.http.get(url) as response:
                assert response.status == 405 and "error" in await response.json()
            async with d.http.get(f"{d.root}/etc/passwd\n") as response:
                assert response.status == 404 and "error" in await response.json()
            assert d.told[-1]["path"] == "unknown", "a stranger's words are not logged"
            chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            chunked += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            assert b" 413 " in await d.raw(chunked + (b"1000\r\n" + b"x" * 4096 + b"\r\n") * 4)
            status, said = await d.post(good)
            assert status == 503 and "no host of this run serves" in said["error"]["message"]
            assert (await d.until_status("down"))["reason"]

    run(main(), LIMIT_S)


def test_connections_that_misbehave(tmp_path: Path, relay_model: ComposedModel) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

    async def main() -> None:
        limits = Limits(body_s=0.3, idle_s=0.5)
        async with lonely_door(tmp_path, relay_model, limits=limits) as d:
            assert await d.raw(head) == b"", "half a header is not waited for"
            slow = await d.raw(head + b"Content-Length: 100\r\nConnection: close\r\n\r\n{")
            assert b" 408 " in slow and b"in time" in slow
            for rubbish in (b"\x16\x03\x01 this is not HTTP\r\n\r\n", head + b"A b\r\n\r\n"):
                answer = await d.raw(rubbish)
                assert b" 400 " in answer and b"application/json" in answer
                said = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
                assert set(said) == {"message", "type", "param", "code"}
                assert "not HTTP" in said["message"]
            long = head + b"X: " + b"y" * 20_000 + b"\r\n\r\n"
            assert b" 400 " in await d.raw(long)
            assert b" 400 " in await d.raw(head + b"A: b\r\n" * 100 + b"\r\n")
        async with lonely_door(tmp_path, relay_model, limits=Limits(connections=2)) as d:
            open_ones = [asyncio.create_task(d.raw(head)) for _ in range(2)]
            assert d.gateway._runner is not None
            server = d.gateway._runner.server
            await until(lambda: server is not None and len(server.connections) == 2)
            answer = await d.raw(b"")
            assert b" 503 " in answer and b"Retry-After" in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"
            for one in open_ones:
                one.cancel()
            await asyncio.gather(*open_ones, return_exceptions=True)
            await until(lambda: server is not None and not server.connections)
            assert (await d.openai.models.list()).data

    run(main(), LIMIT_S)


@pytest.mark.parametrize("host", ["nonsense..host", "x" * 70])
def test_a_name_that_cannot_be_listened_on(
    tmp_path: Path, relay_model: ComposedModel, host: str
) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match=host) as caught:
            async with lonely_door(tmp_path, relay_model, host=host):
                pass
        assert "--host" in caught.value.hint

    run(main(), LIMIT_S)


def test_the_key(tmp_path: Path, relay_model: ComposedModel) -> None:
    async def main() -> None:
        async with lonely_door(tmp_path, relay_model, key=KEY) as d:
            assert (await d.openai.models.list()).data[0].id == "tiny"
            for wrong in ("", "Secret", "secret2", "secre", "s" * 5000, "schlüssel"):
                other = d.openai.with_options(api_key=wrong or "x")
                if wrong.isascii():
                    with pytest.raises(openai.AuthenticationError, match="API key"):
                        await other.models.list()
                status, said = await d.post({}, Authorization=f"Bearer {wrong}")
                assert status == 401 and said["error"]["code"] == "invalid_api_key"
            assert (await d.post({}))[0] == 401
            assert (await d.post({}, Authorization="Basic secret"))[0] == 401
            assert (await d.post({}, Authorization="bearer secret"))[0] == 400
            async with d.http.get(f"{d.root}/nothing") as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
            assert (await d.health())[0] == 503, "health needs no key"
            assert "secret" not in repr(d.gateway.settings) and "secret" not in str(d.told)

    run(main(), LIMIT_S)


def test_too_many_at_once_and_clients_that_leave(
    tmp_path: Path, relay_model: ComposedModel
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client(PATIENT_S)
            limits = Limits(at_once=2, outputs=2)
            async with door(client, plan=BYTEWISE, limits=limits) as d:
                create = d.openai.completions.create
                stream = await create(model="tiny", prompt="a", max_tokens=LONG, stream=True)
                await anext(aiter(stream))
                with pytest.raises(openai.RateLimitError) as caught:
                    await create(model="tiny", prompt=["a", "b"], max_tokens=1)
                assert int(caught.value.response.headers["Retry-After"]) >= 1
                await create(model="tiny", prompt="a", max_tokens=1)
                await stream.close()  # in the middle of it
                await d.writing(0)
                assert not client._pending, "no sweep is waited for"
                await create(model="tiny", prompt=["a", "b"], max_tokens=1)

                asking = asyncio.create_task(create(model="tiny", prompt="a", max_tokens=LONG))
                await d.writing(1)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await d.writing(0)
                assert [f["status"] for f in d.told] == [429, 200, 499, 200, 499]
            await settled(s)

    run(main(), LIMIT_S)
