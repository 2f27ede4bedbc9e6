"""The command `gateway`: options in, log lines out; the work is done in `node.gateway.server`.

Imports of torch, hivemind and aiohttp happen inside: `blockswarm --help` answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from node.commands.options import FiniteRange, PathOption
from node.console.results import Facts, print_json
from node.console.terminal import say
from node.machine.event_loop import run_loop
from node.network.addresses import check_addresses
from protocol.errors import UsageError

if TYPE_CHECKING:
    from node.gateway.server import GatewaySettings

KEY_VARIABLE = "BLOCKSWARM_API_KEY"
KEY_MAX_BYTES = 4096
MODES = ("one-sweep", "exact", "autoregressive")


@click.command(short_help="Answer OpenAI's completions over HTTP with a swarm that serves.")
@click.argument("address", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="IP or name to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="TCP port (0: any free one).",
)
@click.option(
    "--api-key-file",
    type=PathOption(),
    help=f"File with the key that clients must send (or set {KEY_VARIABLE}).",
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="one-sweep",
    show_default=True,
    help="A whole output, verified pieces, or a byte per traversal.",
)
@click.option(
    "--drafts",
    type=click.IntRange(1, 32),
    default=8,
    show_default=True,
    help="Whole drafts to choose from (one-sweep).",
)
@click.option(
    "--draft-length",
    type=click.IntRange(1, 4096),
    default=32,
    show_default=True,
    help="Bytes drafted for a traversal (exact).",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 1 << 20),
    default=4096,
    show_default=True,
    help="The longest output, in bytes.",
)
@click.option(
    "--max-prompt",
    type=click.IntRange(1, 1 << 20),
    default=64 * 1024,
    show_default=True,
    help="The longest prompt, in bytes.",
)
@click.option(
    "--at-once",
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    help="Outputs written at the same time; beyond that clients are told to come back.",
)
@click.option(
    "--time-limit",
    type=FiniteRange(1.0, 3600.0),
    default=120.0,
    show_default=True,
    help="Seconds for one answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Log lines as JSON on stdout.")
def gateway(address: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Put an HTTP server in front of a swarm that serves: OpenAI's completions, for a byte model.

    ADDRESS is any peer of the run (several are better than one). Then, from any program that
    speaks OpenAI's API:

    \b
      curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"model": "NAME", "prompt": "def ", "max_tokens": 64, "stream": true}'

    NAME is the run's name; GET /v1/models has it, GET /health tells whether the swarm answers. A
    token is a byte. It listens on this machine only, unless you say --host; then give it a key and
    put something before it that speaks HTTPS.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise UsageError("this command needs aiohttp", 'pip install "blockswarm[host]"')
    check_addresses(address)
    key = read_key(options["api_key_file"])
    tell = print_json if as_json else _tell_a_person

    def tell_anyone(facts: Facts) -> None:
        with contextlib.suppress(OSError):  # nobody reads our log any more
            tell(facts)

    run_loop(_serve(address, key, options, tell_anyone))
    # All is closed. Unloading torch and hivemind takes seconds on a busy machine.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def read_key(path: Path | None) -> str | None:
    """The key from its file, or from the environment. Not from an option: `ps` shows those."""
    if path is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key and KEY_VARIABLE in os.environ:
            raise UsageError(f"{KEY_VARIABLE} is empty", f"unset {KEY_VARIABLE}, or give it a key")
        return key or None
    try:
        with path.open("rb") as file:
            data = file.read(KEY_MAX_BYTES + 1)
        key = data.decode("ascii").strip()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "check --api-key-file") from error
    except UnicodeDecodeError:
        key = ""
    if not key.isprintable() or not key or " " in key or len(data) > KEY_MAX_BYTES:
        hint = f"openssl rand -hex 32 > {path}"
        raise UsageError(f"{path} has no key: one line of ASCII without spaces", hint)
    return key


def open_to_others(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


async def _serve(
    addresses: tuple[str, ...],
    key: str | None,
    options: Mapping[str, Any],
    tell: Callable[[Facts], None],
) -> None:
    from node.gateway.server import Gateway
    from node.network.client import guest
    from node.serving.client import SweepClient
    from node.serving.server import check_servable
    from protocol.records import Role
    from swarm.runfile import parse, run_id

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def remark(line: str) -> None:
        tell({"event": "remark", "text": line})

    async with guest() as visitor:
        text = await _unless(stop, visitor.fetch_run(addresses))
        if text is None:
            return
        run_file = parse(text)
        check_servable(run_file.run)
        settings = _settings(run_file.name, key, options)
        if key is None and open_to_others(settings.host):
            remark(
                f"anyone who reaches {settings.host} can use this gateway: it has no key "
                f"(--api-key-file, or {KEY_VARIABLE})"
            )
        async with visitor.network(text, addresses, remark, Role(0)) as network:
            client = SweepClient(network, run_id(text), run_file.run, remark)
            server = Gateway(client, settings, tell)
            try:
                await server.start()
                health = await _unless(stop, server.health.now()) or {"status": "stopped"}
                ready = {"url": server.url, "model": settings.model, "swarm": health["status"]}
                tell({"event": "ready", **ready, "key": key is not None})
                await stop.wait()
            finally:
                await server.stop()
                await client.close()
    tell({"event": "stopped"})


async def _unless(stop: asyncio.Event, work: Any) -> Any:
    """What `work` gives, or None if we were told to stop before."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, stopped):
            each.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def _settings(model: str, key: str | None, options: Mapping[str, Any]) -> GatewaySettings:
    from node.gateway.outputs import OutputPlan
    from node.gateway.request import Limits
    from node.gateway.server import GatewaySettings

    mode = options["mode"]
    draft_length = {"one-sweep": None, "exact": options["draft_length"], "autoregressive": 0}[mode]
    limits = Limits(
        length=options["max_tokens"],
        prompt_bytes=options["max_prompt"],
        body_bytes=max(Limits.body_bytes, 8 * options["max_prompt"]),
        outputs=min(Limits.outputs, options["at_once"]),
        at_once=options["at_once"],
        request_s=options["time_limit"],
    )
    plan = OutputPlan(mode, options["drafts"], draft_length)
    return GatewaySettings(model, options["host"], options["port"], key, plan, limits)


def _tell_a_person(facts: Facts) -> None:
    kind = facts["event"]
    if kind == "remark":
        say(facts["text"])
    elif kind == "ready":
        say(f"ready: {facts['url']}  model {facts['model']!r}  swarm {facts['swarm']}")
    elif kind == "request" and (facts["path"], facts["status"]) != ("/health", 200):
        say(_request_line(facts))


def _request_line(facts: Facts) -> str:
    line = f"{facts['method']} {facts['path']} {facts['status']} {facts['seconds']:.2f} s"
    if "completion_bytes" in facts:
        line += f", {facts['prompt_bytes']} + {facts['completion_bytes']} bytes"
        line += f", {facts['traversals']} traversals"
    return line + (f": {facts['error']}" if "error" in facts else "")


gateway_commands = (gateway,)
