"""Commands of ours on hosts of a bed: what they say is kept, and waited for.

Decides how a `blockswarm` command is started on a host, where its words go, and how long its
address may take. Knows nothing of what the words mean beyond the address.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.wan.bed import Bed
from benchmarks.wan.namespaces import BedFailed

START_S = 180.0  # a loaded machine takes tens of seconds to import torch in several processes
_ADDRESS = re.compile(r"blockswarm (?:join|generate) (/ip4/(\S+?)/tcp/\S+)")


class Command:
    """`blockswarm ...` on a host. Its output is in two files of its folder."""

    def __init__(
        self,
        bed: Bed,
        host: str,
        folder: Path,
        arguments: Sequence[object],
        program: Sequence[str] | None = None,
    ) -> None:
        """`program`: what Python runs in the place of `blockswarm`, for a host that lies."""
        folder.mkdir(parents=True, exist_ok=True)
        self.host, self.folder = host, folder
        self.out, self.err = folder / "stdout.txt", folder / "stderr.txt"
        command = [sys.executable, *(program or ("-m", "node.cli")), *map(str, arguments)]
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            one = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            self.process = bed.start(host, command, stdout=out, stderr=err, env=one)

    def address(self, ip: str, seconds: float = START_S) -> str:
        """The address that it tells others, of those with this IP."""
        end_s = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            for address, host in _ADDRESS.findall(self.err.read_text(errors="replace")):
                if host == ip:
                    return str(address)
            if ended or time.monotonic() > end_s:
                raise BedFailed(f"{self.host} told no address", self.last_words())
            # Polls the file that it prints to, until `end_s`.
            time.sleep(0.1)

    def last_words(self) -> str:
        return self.err.read_text(errors="replace")[-500:].strip() or "it said nothing"

    def finish(self, seconds: float) -> int:
        """Wait for its end; its exit code. Raises `BedFailed` if it does not end."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise BedFailed(f"{self.host} does not end", self.last_words()) from None
