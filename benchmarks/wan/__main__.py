"""`python -m benchmarks.wan TOPOLOGY.toml`: a described WAN comes up, a swarm runs on it, it goes.

Exit code 77 where the machine does not allow it (as test runners read: skipped), 2 if the file is
wrong or the swarm fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import harness
from benchmarks.wan import namespaces, runner, topology
from protocol.errors import BlockswarmError


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wan",
        description="Hosts as network namespaces behind an emulated WAN, and a swarm on them. "
        "See docs/wan.md for what a topology file says.",
    )
    parser.add_argument("topology", type=Path, nargs="?", help="a topology file (TOML)")
    parser.add_argument("--out", type=Path, help="write figures and rows as JSON")
    parser.add_argument("--folder", type=Path, help="keep the hosts' folders here")
    parser.add_argument("--clean", action="store_true", help="only remove what a crash has left")
    options = parser.parse_args()
    try:
        removed = namespaces.clean_stale()
        if removed:
            _say(f"removed what an earlier bed had left: {', '.join(removed)}")
        if options.clean:
            return
        if options.topology is None:
            parser.error("which topology? For example benchmarks/wan/three.toml")
        with namespaces.or_skipped():
            _run(options)
    except BlockswarmError as error:
        runner.explain(error)
        sys.exit(2)


def _run(options: argparse.Namespace) -> None:
    described = topology.load(options.topology)
    text = options.topology.read_text()
    base = options.topology.resolve().parent
    with tempfile.TemporaryDirectory(prefix="blockswarm-wan-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        figures, rows = runner.run(text, folder.resolve(), base, _say)
    facts = {"topology": described.name}
    out = options.out
    if out is None:
        for name, value in figures.items():
            print(f"{name} = {value:.6g}")
        return
    shown = argparse.Namespace(quick=False, out=out)
    harness.write(shown, "wan", figures, rows, facts)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
