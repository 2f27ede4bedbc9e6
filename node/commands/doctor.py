"""`blockswarm doctor`: the checks as a list for a person, or as JSON.

Decides how findings look. What is checked, and what counts as wrong, stands in `node.doctor`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from node.commands.options import PathOption
from node.console.results import print_json
from node.doctor.examine import Check, Examination, examine, facts, well
from node.machine.event_loop import run_loop

MARKS = {"ok": "ok  ", "warning": "WARN", "failed": "FAIL", "skipped": "-   "}


@click.command(short_help="What is wrong with this machine, and how to fix it.")
@click.argument("address", nargs=-1)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="The TCP port that your host has, or will have (default: any free one).",
)
@click.option("--listen", multiple=True, metavar="IP", help="IP to listen on (default: all).")
@click.option("--folder", type=PathOption(), help="Where the host's state is, or will be.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def doctor(
    address: tuple[str, ...],
    port: int,
    listen: tuple[str, ...],
    folder: Path | None,
    as_json: bool,
) -> None:
    """Check Python, the packages, torch, memory, disk, the port and p2pd.

    With the ADDRESS of one or more peers of a run also: whether they answer and if not why not,
    this machine's clock against theirs, and whether they can reach it: they open a new connection
    to --port. So give the port that you have opened in the firewall or forwarded on the router.
    Nothing is changed, and nobody is told more than your IP.

    \b
      blockswarm doctor
      blockswarm doctor /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo... --port 31337

    Whatever failed comes with numbered fixes. The exit code is 0 if all is well, 1 if not.
    """
    from node.network.addresses import listening_on, split_peer

    for text in address:
        split_peer(text)
    listening_on(listen, port)  # refuses what is no IP
    hear = (lambda check: None) if as_json else show
    found = run_loop(examine(Examination(address, port, listen, folder), hear))
    if as_json:
        print_json(facts(found))
    else:
        _sum_up(found)
    sys.stdout.flush()
    if not well(found):
        sys.exit(1)


def show(check: Check) -> None:
    """A finding, and what to do about it."""
    print(f"{MARKS[check.state]}  {check.name:<13} {_printable(check.what)}", flush=True)
    for number, fix in enumerate(check.fixes, 1):
        print(f"{'':<8}{number}. {_printable(fix)}", flush=True)


def _sum_up(checks: list[Check]) -> None:
    failed = [check.name for check in checks if check.state == "failed"]
    print()
    if failed:
        print(f"not well: {', '.join(dict.fromkeys(failed))}. Try the fixes in their order.")
    else:
        print("all is well")


def _printable(text: str) -> str:
    """Names of files and words of peers are in it."""
    return "".join(c if c.isprintable() else "?" for c in text)


doctor_commands = (doctor,)
