"""A storm on the emulated WAN: hosts and daemons are killed, stopped, cut off, lied to; what holds?

Seven hosts train two blocks, only with `blockswarm seed` and `join`. In five minutes come kill -9
of a node, of its p2pd, of its trainer and of all at once, SIGSTOP of 20 s, a partition, the death
of the seed, a liar and a newcomer that joins through an ordinary host. Throughout:

    hangs                 silences of a host that was up, longer than three rounds, and hosts that
                          did not leave within 20 s
    digest_disagreements  stretches of more than three rounds in which connected honest replicas
                          of a block stood on different digests
    lost_rounds           the most that a host's consensus ever fell back by
    orphans               processes of a killed host that live on, or that outlive a host which left
    memory_growth_percent of the host that grew most, from when it had settled to the end

`--quick`: three faults in a minute.
"""

from __future__ import annotations

from benchmarks import harness
from benchmarks.storm.rows import run
from benchmarks.wan import namespaces


def main() -> None:
    with namespaces.or_skipped():
        namespaces.check_rights()
    namespaces.clean_stale()
    harness.main("storm", run, seeds=[0])


if __name__ == "__main__":
    main()
