"""The gateway: OpenAI's own client before real hosts on loopback, and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import ClientSession
from click.testing import CliRunner
from conftest import MakeModel, MakeRun
from live import Process
from loopback import _no_daemon_left, node, run, until, until_async  # noqa: F401
from openai import AsyncOpenAI, OpenAI
from test_node_serving import Swarm, local, mean_model, relay_model, swarm  # noqa: F401

from node.cli import cli
from node.cli_gateway import KEY_VARIABLE, open_to_others, read_key
from node.gateway import Gateway, GatewaySettings
from node.gateway_outputs import Plan
from node.gateway_request import Limits
from node.model_folder import save_model
from node.sweep_client import SweepClient
from protocol.errors import BlockswarmError, UsageError
from swarm.composition import ComposedModel

EXACT, BYTEWISE = Plan("exact", 1, 6), Plan("autoregressive", 1, 0)
KEY = "secret"
LONG = 4000  # bytes one by one: many seconds, so that it is still being written when we look
PATIENT_S = 12.0  # for a hop: a sweep that is sent again has another seed
LIMIT_S = 180.0  # on a machine that twenty others want, too
RESET = b" 400  413 "
PEER = "12D3KooWB4TYiYwXED7sAtDgh7FWPKYN3qE48tRWxnTBQadUSChs"


@dataclass
class Door:
    """A gateway, OpenAI's client for it, and what the gateway told of its requests."""

    gateway: Gateway
    openai: AsyncOpenAI
    http: ClientSession
    told: list[dict[str, Any]]

    @property
    def root(self) -> str:
        return self.gateway.url.removesuffix("/v1")

    async def raw(self, sent: bytes) -> bytes:
        """What comes back for these bytes until the gateway closes the connection.

        It may close it before it has read all of them: then its answer may be lost on the way.
        """
        host, port = self.root.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(sent)
            return await reader.read()
        except ConnectionResetError:
            return RESET
        finally:
            writer.close()

    async def post(self, body: bytes | dict[str, Any], **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        url = f"{self.root}/v1/completions"
        async with self.http.post(url, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def health(self) -> tuple[int, Any]:
        async with self.http.get(f"{self.root}/health") as response:
            return response.status, await response.json()

    async def until_status(self, status: str) -> Any:
        """The health, as soon as it is this. A slow machine may find hosts absent for a while."""
        found: list[Any] = []

        async def is_so() -> bool:
            code, health = await self.health()
            assert code == (503 if health["status"] == "down" else 200)
            found.append(health)
            return bool(health["status"] == status)

        await until_async(is_so, 90)
        return found[-1]

    async def writing(self, outputs: int) -> None:
        await until(lambda: self.gateway.writing == outputs, 60)


@contextlib.asynccontextmanager
async def door(client: SweepClient, **settings: Any) -> AsyncIterator[Door]:
    told: list[dict[str, Any]] = []
    gateway = Gateway(client, GatewaySettings("tiny", port=0, **settings), told.append)
    await gateway.start()
    try:
        async with (
            AsyncOpenAI(base_url=gateway.url, api_key=KEY, max_retries=0) as client_,
            ClientSession() as http,
        ):
            yield Door(gateway, client_, http, told)
    finally:
        await gateway.stop()


@contextlib.asynccontextmanager
async def lonely_door(folder: Path, model: ComposedModel, **settings: Any) -> AsyncIterator[Door]:
    """A gateway before a swarm in which nobody serves."""
    async with node(folder, "a") as a:
        client = SweepClient(a, a.settings.run_id, model.run)
        async with door(client, **settings) as d:
            yield d


async def settled(s: Swarm) -> None:
    """The hosts have put away the sweeps that nobody waits for any more."""
    await until(lambda: not any(server._jobs for server in s.servers.values()), 60)


# Answers.


def test_the_real_client(tmp_path: Path, relay_model: ComposedModel) -> None:  # noqa: F811
    def expected(prompt: bytes, length: int) -> str:
        return local(relay_model, prompt, length).decode(errors="replace")

    async def main() -> None:
        async with (
            swarm(tmp_path, relay_model) as s,
            door(await s.client(PATIENT_S), plan=EXACT) as d,
        ):
            create = d.openai.completions.create
            one = await create(model="tiny", prompt="abc", max_tokens=20, temperature=0)
            assert one.choices[0].text == expected(b"abc", 20)
            assert one.choices[0].finish_reason == "length"
            assert one.object == "text_completion" and one.model == "tiny"
            assert one.usage is not None and one.usage.prompt_tokens == 3
            assert one.usage.completion_tokens == 20 and one.usage.total_tokens == 23
            extra = (one.choices[0].model_extra or {})["blockswarm"]
            assert extra["missing_blocks"] == [] and 0 < extra["traversals"] <= 20

            many = await create(model="tiny", prompt=["abc", "ä"], n=2, max_tokens=9, temperature=0)
            assert [c.index for c in many.choices] == [0, 1, 2, 3]
            assert many.choices[1].text == expected(b"abc", 9)
            assert many.choices[2].text == expected("ä".encode(), 9)
            assert many.usage is not None and many.usage.completion_tokens == 36

            stream = await create(
                model="tiny",
                prompt=["abc", "x"],
                max_tokens=20,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            for index, prompt in enumerate((b"abc", b"x")):
                said = [c for chunk in chunks for c in chunk.choices if c.index == index]
                assert "".join(c.text for c in said) == expected(prompt, 20)
                assert [c.finish_reason for c in said if c.finish_reason] == ["length"]
            assert len(chunks) > 3, "pieces, as they were verified"
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 40

            raw = await create(model="tiny", prompt=[0, 255], max_tokens=9, temperature=0)
            assert raw.choices[0].text == expected(b"\x00\xff", 9)
            assert all(facts["status"] == 200 for facts in d.told)
            assert d.gateway.writing == 0

    run(main(), LIMIT_S)


def test_one_sweep_and_stop_sequences(tmp_path: Path, mean_model: ComposedModel) -> None:  # noqa: F811
    async def main() -> None:
        async with swarm(tmp_path, mean_model) as s, door(await s.client(PATIENT_S)) as d:

            async def create(**more: Any) -> Any:
                return await d.openai.completions.create(
                    model="tiny", prompt="abc", max_tokens=40, seed=5, **more
                )

            whole = (await create()).choices[0]
            assert whole.finish_reason == "length"
            assert (await create()).choices[0].text == whole.text, "the same seed, the same text"
            both = await create(n=2, extra_body={"top_k": 256})
            assert both.choices[0].text == whole.text != both.choices[1].text
            place, end = next((i, c) for i, c in enumerate(whole.text) if i and c != "\ufffd")
            cut = await create(stop=[end, "never"])
            place = whole.text.index(end)
            assert cut.choices[0].text == whole.text[:place]
            assert cut.choices[0].finish_reason == "stop"
            assert cut.usage.completion_tokens < 40
            stream = await create(stop=end, stream=True)
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].text for c in chunks) == whole.text[:place]
            assert chunks[-1].choices[0].finish_reason == "stop"

    run(main(), LIMIT_S)


def test_models_health_and_no_chat(tmp_path: Path, relay_model: ComposedModel) -> None:  # noqa: F811
    async def main() -> None:
        async with swarm(tmp_path, relay_model, "a-c") as s, door(await s.client(PATIENT_S)) as d:
            assert [m.id async for m in d.openai.models.list()] == ["tiny"]
            assert (await d.openai.models.retrieve("tiny")).owned_by == "blockswarm"
            with pytest.raises(openai.NotFoundError, match="no model"):
                await d.openai.models.retrieve("gpt 4")
            with pytest.raises(openai.NotFoundError, match="base model"):
                await d.openai.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "hello"}]
                )
            health = await d.until_status("degraded")
            assert 1 in health["missing_blocks"] and health["outputs_now"] == 0
            assert {b["block"] for b in health["blocks"]} <= {0, 2}
            assert all(b["hosts"] == 1 and b["round"] == 1 for b in health["blocks"])
            answer = await d.openai.completions.create(model="tiny", prompt="a", max_tokens=5)
            assert (answer.choices[0].model_extra or {})["blockswarm"]["missing_blocks"] == [1]

    run(main(), LIMIT_S)


# Strangers.


def test_bad_requests_are_answered_in_openais_form(
    tmp_path: Path,
    relay_model: ComposedModel,  # noqa: F811
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


def test_connections_that_misbehave(tmp_path: Path, relay_model: ComposedModel) -> None:  # noqa: F811
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

    async def main() -> None:
        limits = Limits(body_s=0.3, idle_s=0.5)
        async with lonely_door(tmp_path, relay_model, limits=limits) as d:
            assert await d.raw(head) == b"", "half a header is not waited for"
            slow = await d.raw(head + b"Content-Length: 100\r\nConnection: close\r\n\r\n{")
            assert b" 408 " in slow and b"in time" in slow
            assert b" 400 " in await d.raw(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            long = head + b"X: " + b"y" * 20_000 + b"\r\n\r\n"
            assert b" 400 " in await d.raw(long)
            assert b" 400 " in await d.raw(head + b"A: b\r\n" * 100 + b"\r\n")
        async with lonely_door(tmp_path, relay_model, limits=Limits(connections=2)) as d:
            open_ones = [asyncio.create_task(d.raw(head)) for _ in range(2)]
            assert d.gateway._runner is not None
            server = d.gateway._runner.server
            await until(lambda: server is not None and len(server.connections) == 2)
            assert b" 503 " in await d.raw(b"")
            for one in open_ones:
                one.cancel()
            await asyncio.gather(*open_ones, return_exceptions=True)
            await until(lambda: server is not None and not server.connections)
            assert (await d.openai.models.list()).data

    run(main(), LIMIT_S)


def test_the_key(tmp_path: Path, relay_model: ComposedModel) -> None:  # noqa: F811
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
    tmp_path: Path,
    relay_model: ComposedModel,  # noqa: F811
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


def test_what_takes_too_long(tmp_path: Path, relay_model: ComposedModel) -> None:  # noqa: F811
    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            limits = Limits(request_s=1.0)
            async with door(await s.client(PATIENT_S), plan=BYTEWISE, limits=limits) as d:
                create = d.openai.completions.create
                with pytest.raises(openai.InternalServerError, match="longer than 1 s") as caught:
                    await create(model="tiny", prompt="a", max_tokens=LONG)
                assert caught.value.status_code == 504

                async def streamed() -> None:
                    stream = await create(model="tiny", prompt="a", max_tokens=LONG, stream=True)
                    _ = [chunk async for chunk in stream]

                with pytest.raises(openai.APIError, match="longer than 1 s"):
                    await streamed()
                await d.writing(0)
            await settled(s)

    run(main(), LIMIT_S)


def test_a_swarm_that_loses_its_hosts(tmp_path: Path, relay_model: ComposedModel) -> None:  # noqa: F811
    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client(hop_min_s=1.0)
            async with door(client, plan=BYTEWISE) as d:
                create = d.openai.completions.create
                stream = await create(model="tiny", prompt="a", max_tokens=LONG, stream=True)
                await anext(aiter(stream))
                assert len((await d.until_status("ok"))["blocks"]) == 3
                for host in s.hosts.values():
                    await host.stop()
                with pytest.raises(openai.APIError, match="the swarm does not answer"):
                    _ = [chunk async for chunk in stream]
                with pytest.raises(
                    openai.InternalServerError, match="the swarm does not answer"
                ) as caught:
                    await create(model="tiny", prompt="a", max_tokens=1)
                assert caught.value.status_code == 503
                assert (await d.until_status("down"))["missing_blocks"] == [0, 1, 2]
                await d.writing(0)

    run(main(), LIMIT_S)


def test_stopping_ends_open_answers(tmp_path: Path, relay_model: ComposedModel) -> None:  # noqa: F811
    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client(PATIENT_S)
            async with door(client, plan=BYTEWISE) as d:
                create = d.openai.completions.create
                stream = await create(model="tiny", prompt="a", max_tokens=LONG, stream=True)
                await anext(aiter(stream))
                asking = asyncio.create_task(create(model="tiny", prompt="a", max_tokens=LONG))
                await d.writing(2)
                stopping = asyncio.create_task(d.gateway.stop())
                with pytest.raises(openai.APIError, match="stopping"):
                    _ = [chunk async for chunk in stream]
                with pytest.raises(openai.InternalServerError, match="stopping"):
                    await asking
                async with asyncio.timeout(30):  # 5, if nobody else wants this machine
                    await stopping
                with pytest.raises(openai.APIConnectionError):
                    await d.openai.models.list()
            await settled(s)

    run(main(), LIMIT_S)


# The command.


def test_keys_are_read_from_files_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_key(None) is None
    monkeypatch.setenv(KEY_VARIABLE, "from-environment")
    assert read_key(None) == "from-environment"
    path = tmp_path / "key"
    path.write_text("from-file\n")
    assert read_key(path) == "from-file"
    for bad in (b"", b"\n", b"two words", b"two\nlines", b"\xff\xfe", b"k" * 5000):
        path.write_bytes(bad)
        with pytest.raises(UsageError, match="no key"):
            read_key(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_key(tmp_path / "nothing")
    monkeypatch.setenv(KEY_VARIABLE, " ")
    with pytest.raises(UsageError, match="empty"):
        read_key(None)


def test_who_can_reach_a_host() -> None:
    assert not any(map(open_to_others, ("127.0.0.1", "::1", "localhost", "127.1.2.3")))
    assert all(map(open_to_others, ("0.0.0.0", "::", "192.168.1.2", "example.org")))


def test_mistakes_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    result = CliRunner().invoke(cli, ["gateway", f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"])
    assert isinstance(result.exception, BlockswarmError)
    assert "no peer answers" in result.exception.message
    assert CliRunner().invoke(cli, ["gateway"]).exit_code == 2
    help_text = CliRunner().invoke(cli, ["gateway", "--help"]).output
    assert "curl" in help_text and "--api-key-file" in help_text


def test_the_command(tmp_path: Path, tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    """Two processes and the ordinary client; SIGTERM ends an open stream."""
    save_model(tmp_path / "model", tiny_model(tiny_run()), [1, 1, 1], {})
    (tmp_path / "key").write_text("secret\n")
    here = ("--folder", tmp_path / "host", "--listen", "127.0.0.1", "--threads", "1")
    host = Process("serve", "--model", tmp_path / "model", *here)
    front: Process | None = None
    try:
        pattern = re.compile(r"blockswarm generate (/ip4/127\.0\.0\.1/\S+)")
        address = host.until(lambda: next(filter(None, map(pattern.search, list(host.err))), None))
        options = ("--port", "0", "--mode", "autoregressive", "--api-key-file", tmp_path / "key")
        front = Process("gateway", address[1], *options, "--json")
        ready = front.until(lambda: front.events("ready"))[0]
        assert ready["key"] is True
        with OpenAI(base_url=ready["url"], api_key="secret") as client:
            name = client.models.list().data[0].id
            assert name == ready["model"]
            answer = client.completions.create(model=name, prompt="def ", max_tokens=8)
            assert answer.usage is not None and answer.usage.completion_tokens == 8
            stream = client.completions.create(
                model=name, prompt="def ", max_tokens=LONG, stream=True
            )
            assert next(stream).choices[0].finish_reason is None
            began_s = time.monotonic()
            front.signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="stopping"):
                _ = list(stream)
        assert front.wait() == 0
        assert time.monotonic() - began_s < 30.0  # 5, if nobody else wants this machine
        assert front.events("request")[-1]["error"] == "the gateway is stopping"
        assert front.events("stopped")
    finally:
        for process in filter(None, (front, host)):
            process.signal(signal.SIGTERM)
            process.kill()
