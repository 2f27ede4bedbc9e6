"""What block-wise training costs in quality: honest CE beside an end-to-end Transformer.

Byte-level WikiText-2, all rows on the same batches in the same order, CE over 250 kB of the valid
split. Composition weights are fitted on other bytes of it. Rows differ in one thing each; those
that could refute us are among them (z removed, one block on four times the bytes, no relay).
"""

from __future__ import annotations

from functools import partial

from benchmarks import harness
from benchmarks.corpus import benchmark_corpus
from benchmarks.quality.row import measure
from benchmarks.quality.variants import figures, variants


def main() -> None:
    options = harness.parse("quality")
    corpus = benchmark_corpus()
    facts = {
        "data": {"source": corpus.source, "sha256": corpus.sha256, "split": "valid"},
        "seeds": [0, 1, 2],
    }
    table = variants(options.quick)
    # Asked once, before anything is measured: a commit made meanwhile is not the code that runs.
    unfinished, origin = options.out.parent / "unfinished", harness.origin()
    resuming = partial(measure, unfinished=unfinished, origin=origin)
    harness.measure_rows(options, "quality", table, resuming, figures, facts)


if __name__ == "__main__":
    main()
