"""The gateway: OpenAI's own client before real hosts on loopback, and hosts that fall silent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from node.gateway.request import Limits
from swarm.learning.composition import ComposedModel
from tests.support.gateway_door import BYTEWISE, EXACT, LIMIT_S, LONG, PATIENT_S, door, settled
from tests.support.loopback import _no_daemon_left, run, until  # noqa: F401
from tests.support.serving_swarm import local, swarm

# Answers.


def test_the_real_client(tmp_path: Path, relay_model: ComposedModel) -> None:
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


def test_one_sweep_and_stop_sequences(tmp_path: Path, mean_model: ComposedModel) -> None:
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


def test_models_health_and_no_chat(tmp_path: Path, relay_model: ComposedModel) -> None:
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


# Ends.


def test_what_takes_too_long(tmp_path: Path, relay_model: ComposedModel) -> None:
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


def test_a_swarm_that_loses_its_hosts(tmp_path: Path, relay_model: ComposedModel) -> None:
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


def test_stopping_ends_open_answers(tmp_path: Path, relay_model: ComposedModel) -> None:
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
