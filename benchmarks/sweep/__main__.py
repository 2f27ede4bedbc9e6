"""Serving over a WAN: a whole output per traversal beside a byte per traversal, and their quality.

Three hosts, one block each (`blockswarm serve --model`), and a client, in four network namespaces
with 100 Mbit lines; all pairs of them have one round-trip time. The same model, hosts and client
for all modes. A small model, trained here in minutes and kept in the cache folder: what is measured
is the serving, and the quality of a mode against the quality of the model that it serves. A quarter
of every batch trained the mode `denoise` (`denoise_share`), so that one model serves for all modes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.harness import Figures, Rows
from benchmarks.sweep.hosts import served_model
from benchmarks.sweep.model import judges, parameters, recipe
from benchmarks.sweep.modes import MODES, QUICK, Scale
from benchmarks.sweep.rows import (
    client_rows,
    compute_alone_s,
    exact_row,
    figures,
    greeting,
    judged_rows,
    timed_rows,
)
from benchmarks.wan.namespaces import or_skipped

QUALITY_RTT_MS = 20  # texts do not depend on it


def run(quick: bool) -> tuple[Figures, Rows]:
    torch.set_num_threads(1)
    scale, wanted = (QUICK if quick else Scale()), recipe(quick)
    judging = judges(wanted)
    compute_s = compute_alone_s(judging, scale.length)
    rows: Rows = []
    with (
        tempfile.TemporaryDirectory(prefix="blockswarm-sweep-") as scratch,
        served_model(wanted.folder / "model", Path(scratch)) as served,
    ):
        for rtt_ms in scale.rtts_ms:
            served.bed.set_rtt(rtt_ms)
            rows += timed_rows(served, judging, scale, rtt_ms, compute_s)
            show(rows[-len(MODES) :])
        served.bed.set_rtt(QUALITY_RTT_MS)
        served.ask([greeting(judging, scale)], look_again=True)
        rows += judged_rows(served, judging, scale)
        show(rows[-len(MODES) - 1 :])
        rows.append(exact_row(served, judging, scale))
        rows += client_rows(served, judging, scale)
        show(rows[-len(scale.clients) - 1 :])
    return figures(rows), rows


def show(rows: Rows) -> None:
    for row in rows:
        facts = (f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, int | float))
        print(f"{row['kind']} {row['name']}: {', '.join(facts)}", flush=True)


def main() -> None:
    options = harness.parse("sweep")
    wanted = recipe(options.quick)
    with or_skipped():
        figures_, rows = run(options.quick)
    corpus = judges(wanted).corpus
    size = parameters(judges(wanted).model)
    data = {"source": corpus.source, "sha256": corpus.sha256}
    model = {"parameters": size, **vars(wanted), "coupling": "look_ahead"}
    facts = {"data": data, "model": model, "seeds": [wanted.seed]}
    harness.write(options, "sweep", figures_, rows, facts)


if __name__ == "__main__":
    main()
