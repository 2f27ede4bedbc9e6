"""Which WikiText-2 the benchmarks read."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.corpus import WIKITEXT2_VARIABLE, benchmark_corpus
from node.data import download
from node.data.corpus import SPLITS
from protocol.errors import DataError


def test_benchmark_corpus_from_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in SPLITS:
        (tmp_path / f"{split}.txt").write_bytes(split.encode() * 100)
    monkeypatch.setenv(WIKITEXT2_VARIABLE, str(tmp_path))
    corpus = benchmark_corpus()
    assert corpus.name == "wikitext-2"
    assert WIKITEXT2_VARIABLE in corpus.source
    assert "not a known version" in corpus.source
    assert str(tmp_path) not in corpus.source
    (tmp_path / "valid.txt").unlink()
    (tmp_path / "test.txt").unlink()
    with pytest.raises(DataError, match=r"has no train\.txt"):
        benchmark_corpus()
    monkeypatch.setenv(WIKITEXT2_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="names no folder"):
        benchmark_corpus()


def test_benchmark_corpus_beside_the_repository_or_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WIKITEXT2_VARIABLE, raising=False)
    monkeypatch.setattr(harness, "ROOT", tmp_path / "repo")
    text = tmp_path / "cache" / "wikitext-2" / "text"
    text.mkdir(parents=True)
    receipt = []
    for split in SPLITS:
        path = text / f"wiki.{split}.raw"
        path.write_bytes(split.encode() * 100)
        receipt.append(f'"{path.name}": "{download.sha256_file(path)}"')
    (text / download.RECEIPT).write_text("{" + ", ".join(receipt) + "}")
    cached = benchmark_corpus(cache=tmp_path / "cache")
    assert cached.source == "wikitext-2-raw-v1.zip (raw)"

    beside = tmp_path / "shared" / "data" / "wikitext-2"
    beside.mkdir(parents=True)
    for split in SPLITS:
        (beside / f"{split}.txt").write_bytes(split.encode() * 50)
    corpus = benchmark_corpus(cache=tmp_path / "cache")
    assert corpus.source.startswith("../shared/data/wikitext-2")
    assert corpus.sha256 != cached.sha256
