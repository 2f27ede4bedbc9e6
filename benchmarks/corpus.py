"""The WikiText-2 that benchmarks read, and which one it is."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from benchmarks import harness
from node.data.corpus import SPLITS, Corpus, load_corpus
from protocol.errors import DataError

WIKITEXT2_VARIABLE = "BLOCKSWARM_WIKITEXT2"
KNOWN_TRAIN = {
    "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f": "tokenised",
    "6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57": "raw",
}


def benchmark_corpus(cache: Path | None = None) -> Corpus:
    """The folder named by BLOCKSWARM_WIKITEXT2; otherwise `../shared/data/wikitext-2` beside the
    repository if it is there; otherwise the cached download.

    The tokenised and the raw text are different corpora, and their figures do not compare: `source`
    says which one it is. No absolute path gets into it, since results are published.
    """
    named = os.environ.get(WIKITEXT2_VARIABLE, "")
    beside = harness.ROOT.parent / "shared" / "data" / "wikitext-2"
    if named:
        folder, described = Path(named).expanduser(), f"the folder in {WIKITEXT2_VARIABLE}"
    elif beside.is_dir():
        folder, described = beside, "../shared/data/wikitext-2"
    else:
        return load_corpus("wikitext-2", cache)
    if not folder.is_dir():
        raise DataError(f"{WIKITEXT2_VARIABLE} names no folder: {named}", "correct or unset it")
    if not all((folder / f"{split}.txt").is_file() for split in SPLITS):
        raise DataError(f"{folder} has no train.txt, valid.txt and test.txt", "correct or unset it")
    corpus = load_corpus(str(folder))
    kind = KNOWN_TRAIN.get(hashlib.sha256(corpus.train.data).hexdigest(), "not a known version")
    return replace(corpus, name="wikitext-2", source=f"{described} ({kind})")
