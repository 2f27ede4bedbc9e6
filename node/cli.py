"""The command line: `blockswarm`. Options in, text or JSON out; the work is done elsewhere.

A foreseeable mistake ends in one clear line and exit code 2, never in a traceback. Importing this
does not import torch: `blockswarm --help` answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Any

import click

from node.machine import own_packages  # noqa: F401 (importing it is a check, so it comes first)

# isort: split

from node.commands.assemble import assemble_commands
from node.commands.demo import demo_commands
from node.commands.doctor import doctor_commands
from node.commands.gateway import gateway_commands
from node.commands.init import operator_commands
from node.commands.light import light_commands
from node.commands.local import local_commands
from node.commands.report import report_commands
from node.commands.serve import serve_commands
from node.commands.simulate import simulate_commands
from node.commands.swarm import swarm_commands
from node.console.terminal import show_error
from node.machine.whole_import import guard_torch
from protocol.errors import BlockswarmError, UsageError
from protocol.version import PACKAGE_VERSION, PROTOCOL_MAJOR, PROTOCOL_MINOR

# What a full disk, a lost terminal or a stream that is not open for writing says.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

READER_LEFT = 141  # as a shell says it of SIGPIPE

HELP = """Train one model in blocks, each block alone on a local denoising objective.

\b
On one machine, with no network:
  blockswarm train -o model/                  train on the text of CPython's own library
  blockswarm eval model/                      honest cross entropy, per block and composed
  blockswarm generate model/ --prompt "def "  let it write
  blockswarm probe model/                     does any block read its own target?

\b
In a swarm:
  blockswarm init run.toml                    describe a run
  blockswarm seed run.toml                    start it, and print how others join
  blockswarm join ADDRESS                     train a block of it
  blockswarm status [ADDRESS]                 see how it stands
  blockswarm assemble ADDRESS -o model/       put its blocks together into one model
  blockswarm serve ADDRESS --block 0          serve a block of it, without training
  blockswarm generate ADDRESS --prompt "def " let its hosts write, together
  blockswarm gateway ADDRESS                  answer OpenAI's completions over HTTP with it
  blockswarm peers --light ADDRESS            look at it from outside
  blockswarm report FOLDER...                 plots and figures from hosts' event logs
  blockswarm demo                             all of that on this machine, in minutes
  blockswarm simulate                         the same hosts on a made-up network
  blockswarm doctor [ADDRESS]                 what is wrong with this machine, and how to fix it

Bring your own text with --data FILE-OR-FOLDER. Every command explains its options with --help.
"""


class Commands(click.Group):
    """click itself would end with 1, as for a failure, when the reader of a pipe has left."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()
            sys.exit(READER_LEFT)
        return found


@click.group(
    cls=Commands,
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(
    PACKAGE_VERSION,
    "-V",
    "--version",
    message=f"blockswarm %(version)s (protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR})",
)
@click.pass_context
def cli(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (
    *local_commands,
    *operator_commands,
    *swarm_commands,
    *assemble_commands,
    *demo_commands,
    *report_commands,
    *light_commands,
    *serve_commands,
    *gateway_commands,
    *doctor_commands,
    *simulate_commands,
):
    cli.add_command(_command)


def main() -> None:
    """The installed command."""
    # Threads that wait for one another should sleep, not spin: a host has other work, and spinning
    # made training many times slower on a busy machine. Read when torch is loaded, so set here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    guard_torch()
    _refuse_closed_output()
    try:
        cli.main(prog_name="blockswarm", standalone_mode=False)
        sys.stdout.flush()  # of --help, too, which is no command
    except BlockswarmError as error:
        show_error(error, _help_command())
        sys.exit(2)
    except click.ClickException as error:
        show_error(UsageError(error.format_message()), _help_command())
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("hivemind", "uvloop"):
            raise
        what = f"this command needs {missing}, which is not installed"
        show_error(UsageError(what, 'pip install "blockswarm[host]"'))
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(READER_LEFT)
    except OSError as error:
        if error.errno not in UNWRITABLE or not _output_fails():
            raise
        _drop_output()
        reason = error.strerror or str(error)
        show_error(
            UsageError(f"cannot write to standard output: {reason}", "send it somewhere else")
        )
        sys.exit(2)


def _refuse_closed_output() -> None:
    """`>&-`: Python has no stream then, and the next file that is opened would take its place."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as we live)
    if sys.stdout is None:
        show_error(UsageError("standard output is closed", "to see nothing of it: > /dev/null"))
        sys.exit(2)


def _output_fails() -> bool:
    """Whether it was standard output that failed, and not another file: it fails again."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """What is still buffered must not fail at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help_command() -> str:
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    return f"blockswarm {named} --help" if named in cli.commands else "blockswarm --help"


if __name__ == "__main__":
    main()
