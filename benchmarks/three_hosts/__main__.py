"""The paper's public-network experiments on the emulated WAN: CE gained, bytes moved, who helped.

    sparse  three hosts with public addresses, two workers each on three blocks, so that every block
            has two replicas on different hosts; `blockswarm seed`, `join` and `assemble` only
    dense   the same run file but for its codec: fp32
    full participation   the same bytes seen in longer rounds, with time for everybody: all of the
            six workers are counted in every round, as in the paper's demo of that name
    ten     ten hosts as strangers have them: two behind NAT, one at a tenth of the speed, one
            whose line loses 5 % of its packets
    ten, none slow   the same, the slow host being an ordinary one: what it costs the others

CE is the assembled model's, honest, on WikiText-2's test split (fitted on the valid split); the
start is that of the first weights on the same bytes. GB are the kernels' counts of all hosts, every
byte once, headers, acknowledgements, DHT and the assembly included; the ledgers' count stands
beside it. docs/three-hosts.md says how to repeat it on rented machines.
"""

from __future__ import annotations

from benchmarks import harness
from benchmarks.corpus import benchmark_corpus
from benchmarks.three_hosts.rows import figures, measure, variants
from benchmarks.wan import namespaces

TARGET_CE = 1.811  # where the paper's three-host run ended


def main() -> None:
    options = harness.parse("three_hosts")
    with namespaces.or_skipped():
        namespaces.check_rights()
    namespaces.clean_stale()
    corpus = benchmark_corpus()
    facts = {
        "data": {"source": corpus.source, "sha256": corpus.sha256, "split": "test"},
        "seeds": [0],
        "target_ce": TARGET_CE,
    }
    table = variants(options.quick)
    for variant in table:
        load = 100 * variant.plan.load(variant.workers)
        minutes = variant.plan.seconds / 60
        print(f"{variant.name}: {minutes:.0f} min, training takes {load:.0f} % of two cores")
    options.jobs = 1  # side by side they would slow each other down
    harness.measure_rows(options, "three_hosts", table, measure, figures, facts)


if __name__ == "__main__":
    main()
