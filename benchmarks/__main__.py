"""`python -m benchmarks [--quick]`: every benchmark, one after the other, then the docs page.

Rows that are there already are not measured again, so a cut-off run goes on where it stopped.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks import docs

ALL = (
    "codec",
    "transport",
    "footprint",
    "averaging",
    "node",
    "join_time",
    "lateness",
    "attacks",
    "gb_per_nat",
    "worth",
    "sweep",
    "logical_shape",
    "storm",
    "three_hosts",
    "quality",
)


def main() -> None:
    failed = []
    for name in ALL:
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]]
        # 77: this machine lacks the rights for it, and it has said so.
        if subprocess.run(command, check=False).returncode not in (0, 77):
            failed.append(name)
    docs.main()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
