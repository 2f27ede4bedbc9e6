"""The command line: `blockswarm`. Options in, text or JSON out; the work is done elsewhere.

A foreseeable mistake ends in one clear line and exit code 2, never in a traceback.
"""

from __future__ import annotations

import sys

import click

from node.cli_local import local_commands
from node.terminal import show_error
from protocol.errors import BlockswarmError
from protocol.version import PACKAGE_VERSION, PROTOCOL_MAJOR, PROTOCOL_MINOR

HELP = """Train one model in blocks, each block alone on a local denoising objective.

\b
On one machine, with no network:
  blockswarm train -o model/                  train on the text of CPython's own library
  blockswarm eval model/                      honest cross entropy, per block and composed
  blockswarm generate model/ --prompt "def "  let it write
  blockswarm probe model/                     does any block read its own target?

Every command explains its options with --help.
"""


@click.group(help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    PACKAGE_VERSION,
    message=f"blockswarm %(version)s (protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR})",
)
def cli() -> None:
    pass


for _command in local_commands:
    cli.add_command(_command)


def main() -> None:
    """The installed command."""
    try:
        cli.main(standalone_mode=False)
    except BlockswarmError as error:
        show_error(error)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; there is nobody to tell
        sys.exit(141)


if __name__ == "__main__":
    main()
