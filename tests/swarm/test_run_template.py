"""The run file's template: every field explained, presets of the sizes that are promised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import UsageError
from swarm.cost import parameter_counts
from swarm.run import ModelShape, Noise
from swarm.run_template import PRESETS, TEMPLATE, emit, preset
from swarm.runfile import parse
from tests.support.paths import ROOT

DOCS = ROOT / "docs" / "runfile.md"


def test_presets_have_the_sizes_that_help_states() -> None:
    total = {
        name: sum(parameter_counts(preset(name, name).run.model, "bayes")) / 1e6 for name in PRESETS
    }
    assert total["tiny"] < 2 and round(total["small"]) == 52 and round(total["large"]) == 307
    assert (
        preset("tiny", "x").run.model == ModelShape() and preset("tiny", "x").run.noise == Noise()
    )


def test_every_field_is_explained() -> None:
    """A comment stands above every field or group of fields, and docs/runfile.md has each."""
    above, section, docs = "", "", DOCS.read_text()
    for line in TEMPLATE.splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        elif " = " in line and not line.startswith("#"):
            assert above.startswith("#") or " = " in above or line.startswith("format"), line
            assert f"`{section}{line.partition(' = ')[0]}`" in docs, line
        above = line


def test_floats_survive() -> None:
    runfile = preset("tiny", "x")
    training = replace(runfile.run.training, learning_rate=1e-05, clip_norm=1e16)
    runfile = replace(runfile, run=replace(runfile.run, training=training))
    assert parse(emit(runfile)) == runfile


def test_unknown_preset() -> None:
    with pytest.raises(UsageError, match="huge"):
        preset("huge", "x")
