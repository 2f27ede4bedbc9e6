"""`blockswarm gateway`: where its key comes from, who can reach it, and two real processes."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import openai
import pytest
from click.testing import CliRunner
from openai import OpenAI

from node.cli import cli
from node.commands.gateway import KEY_VARIABLE, open_to_others, read_key
from node.local.model_folder import save_model
from protocol.errors import BlockswarmError, UsageError
from tests.conftest import MakeModel, MakeRun
from tests.support.gateway_door import LONG
from tests.support.live import Process
from tests.support.loopback import _no_daemon_left  # noqa: F401

PEER = "12D3KooWB4TYiYwXED7sAtDgh7FWPKYN3qE48tRWxnTBQadUSChs"


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
