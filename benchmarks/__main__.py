"""`python -m benchmarks [--quick]`: every benchmark, one after the other, then the docs page.

Rows that are there already are not measured again, so a cut-off run goes on where it stopped.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks import docs

ALL = ("codec", "transport", "footprint", "gb_per_nat", "quality")


def main() -> None:
    failed = []
    for name in ALL:
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    docs.main()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
