"""The architecture: protocol <- swarm <- node; a core with no clock or global generator.

And nowhere pickle, or other code out of data: not in the node or the benchmarks either.
"""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT

MAY_IMPORT = {
    "protocol": {"protocol"},
    "swarm": {"protocol", "swarm"},
    "node": {"protocol", "swarm", "node"},
}
OURS = {"protocol", "swarm", "node", "benchmarks", "tests"}
NETWORK = {"hivemind", "libp2p", "multiaddr", "uvloop", "trio", "socket", "ssl", "socketserver"}
# Only names to look for: nothing here is imported, and the snippets below are parsed, never run.
UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Calls that run code of whoever wrote the data. NumPy's are safe unless they are told otherwise.
RUNS_CODE = {"eval", "exec", "__import__", "torch.load", "torch.save"}
RUNS_CODE |= {f"yaml.{name}" for name in ("load", "load_all", "unsafe_load", "full_load")}
RUNS_CODE |= {f"pandas.{name}" for name in ("read_pickle", "eval")}
MAY_PICKLE = {"numpy.load": 2, "numpy.save": 2}  # where `allow_pickle` stands
IMPORTS_BY_NAME = {"importlib.import_module", "importlib.__import__", "__import__"}
DRAWS = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal", "poisson"}
FILES = [
    pytest.param(package, path, id=str(path.relative_to(ROOT)))
    for package in MAY_IMPORT
    for path in sorted((ROOT / package).rglob("*.py"))
]
CORE = [param for param in FILES if param.values[0] != "node"]
BENCHMARKS = [
    pytest.param("benchmarks", path, id=str(path.relative_to(ROOT)))
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.AST, package: str = "") -> set[str]:
    """Top-level names of everything that is imported, inside functions and by name too."""
    found: set[str] = set()
    names = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0] if node.level == 0 else package)
        elif isinstance(node, ast.Call) and called(node, names) in IMPORTS_BY_NAME:
            found.add(_named(node))
    return found


def _named(call: ast.Call) -> str:
    """The top-level name in `import_module("a.b")`; "?" if it is put together as it runs."""
    given = [*call.args, *(word.value for word in call.keywords if word.arg == "name")]
    text = given[0] if given else None
    if isinstance(text, ast.JoinedStr) and text.values:  # f"a.{b}": its beginning may be enough
        text = text.values[0]
        if isinstance(text, ast.Constant) and "." not in str(text.value):
            return "?"
    if not (isinstance(text, ast.Constant) and isinstance(text.value, str)):
        return "?"
    return text.value.partition(".")[0]


def aliases(tree: ast.AST) -> dict[str, str]:
    """What names of a file stand for: `np` for numpy, `load` for torch.load."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def called(node: ast.Call, names: dict[str, str]) -> str:
    """The full name of what is called, whatever it is called by here."""
    first, dot, rest = dotted(node.func).partition(".")
    return (names.get(first, first) + dot + rest).removeprefix("builtins.")


def runs_code(tree: ast.Module) -> Iterator[str]:
    """Calls that could run code out of data, with their lines."""
    names = aliases(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = called(node, names)
        if name in RUNS_CODE:
            yield f"line {node.lineno}: {name}("
        if name in MAY_PICKLE:
            given = [word.value for word in node.keywords if word.arg in {"allow_pickle", None}]
            given += node.args[MAY_PICKLE[name] :][:1]
            if any(not (isinstance(v, ast.Constant) and v.value is False) for v in given):
                yield f"line {node.lineno}: {name}(allow_pickle)"


def dotted(node: ast.expr) -> str:
    """`a.b.c` for an attribute chain, or "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def complaints(tree: ast.Module) -> Iterator[str]:
    """What no file of the core may do, with its line."""
    forked = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        and any("fork_rng" in ast.unparse(item.context_expr) for item in node.items)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node)
            if name == "time.time" or name.startswith("datetime.datetime.now"):
                yield f"line {node.lineno}: {name}: time is passed in"
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module == "time" and "time" in names:
                yield f"line {node.lineno}: from time import time"
            if node.module in {"random", "numpy.random"} and names - {"Random", "Generator"}:
                yield f"line {node.lineno}: functions of the global generator are imported"
        if isinstance(node, ast.Call):
            yield from _call_complaints(node, dotted(node.func), id(node) in forked)


def _call_complaints(node: ast.Call, name: str, forked: bool) -> Iterator[str]:
    given = {keyword.arg for keyword in node.keywords}
    if name.startswith("random.") and name != "random.Random":
        yield f"line {node.lineno}: {name} draws from the global generator"
    if name == "random.Random" and not node.args:
        yield f"line {node.lineno}: random.Random() seeds itself from the system"
    if name.startswith(("np.random.", "numpy.random.")):
        seeded = bool(node.args or node.keywords)
        own = name.rpartition(".")[2] in {"default_rng", "Generator", "Philox", "PCG64"}
        if not (own and seeded):
            yield f"line {node.lineno}: {name} draws from the global generator"
    if name in {f"torch.{draw}" for draw in DRAWS} and not forked and "generator" not in given:
        yield f"line {node.lineno}: {name} has no generator"
    if name in {"torch.manual_seed", "torch.seed"} and not forked:
        yield f"line {node.lineno}: {name} outside of fork_rng changes the caller's generator"


@pytest.mark.parametrize(("package", "path"), FILES)
def test_imports_point_one_way(package: str, path: Path) -> None:
    wrong = (imported(_tree(path), package) & OURS) - MAY_IMPORT[package]
    assert not wrong, f"{package} must not import {sorted(wrong)}"


@pytest.mark.parametrize(("package", "path"), CORE)
def test_the_core_names_what_it_imports(package: str, path: Path) -> None:
    assert "?" not in imported(_tree(path), package)


@pytest.mark.parametrize(("package", "path"), [*FILES, *BENCHMARKS])
def test_nothing_unsafe_is_imported_or_called(package: str, path: Path) -> None:
    tree = _tree(path)
    assert not imported(tree) & UNSAFE
    assert not list(runs_code(tree))


@pytest.mark.parametrize(("package", "path"), CORE)
def test_core_has_no_network(package: str, path: Path) -> None:
    assert not imported(_tree(path)) & NETWORK


@pytest.mark.parametrize(("package", "path"), CORE)
def test_core_is_passed_its_time_and_randomness(package: str, path: Path) -> None:
    assert not list(complaints(_tree(path)))


@pytest.mark.parametrize(
    "source",
    [
        "import time\nnow = time.time()",
        "import time\nclock = time.time",
        "from time import time",
        "import random\nrandom.choice([1])",
        "import random\nrandom.Random()",
        "from random import choice",
        "import numpy as np\nnp.random.rand(3)",
        "import numpy as np\nnp.random.default_rng()",
        "import torch\ntorch.randn(3)",
        "import torch\ntorch.manual_seed(0)",
    ],
)
def test_the_check_catches(source: str) -> None:
    assert list(complaints(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import time\nclock = time.monotonic",
        "import random\nrandom.Random(3).choice([1])",
        "import numpy as np\nnp.random.default_rng(3)",
        "import torch\ntorch.randn(3, generator=g)",
        "import torch\nwith torch.random.fork_rng(devices=[]):\n    torch.manual_seed(0)",
    ],
)
def test_the_check_allows(source: str) -> None:
    assert not list(complaints(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "exec('1')",
        "__import__('os')",
        "import builtins\nbuiltins.eval('1')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=True)",
        "import torch as t\nt.save(1, 'x')",
        "from torch import load\nload('x')",
        "from torch import load as read\nread('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=wanted)",
        "import numpy\nnumpy.load('x', None, True)",
        "import numpy as np\nnp.load('x', **options)",
        "import numpy as np\nnp.save('x', data, True)",
        "import yaml\nyaml.load(text)",
        "import pandas as pd\npd.read_pickle('x')",
    ],
)
def test_code_out_of_data_is_caught(source: str) -> None:
    assert list(runs_code(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import json\njson.load(file)",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nnp.load('x', 'r', False)",
        "import numpy as np\nnp.load('x', mmap_mode='r', allow_pickle=False)",
        "import numpy as np\nnp.save('x', data)",
        "import yaml\nyaml.safe_load(text)",
        "from node.machine.tensor_file import load\nload('x')",
    ],
)
def test_safe_ways_are_allowed(source: str) -> None:
    assert not list(runs_code(ast.parse(source)))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import importlib\nimportlib.import_module('node.cli')", {"importlib", "node"}),
        ("import importlib as i\ni.import_module(name='pickle')", {"importlib", "pickle"}),
        ("from importlib import import_module as f\nf('node')", {"importlib", "node"}),
        ("__import__('swarm.run')", {"swarm"}),
        ("import importlib\nimportlib.import_module(f'node.{n}')", {"importlib", "node"}),
        ("import importlib\nimportlib.import_module(f'no{n}')", {"importlib", "?"}),
        ("import importlib\nimportlib.import_module('no' + 'de')", {"importlib", "?"}),
        ("import importlib\nimportlib.import_module(name)", {"importlib", "?"}),
    ],
)
def test_the_check_sees_imports_by_name(source: str, names: set[str]) -> None:
    assert imported(ast.parse(source)) == names


def test_the_check_sees_imports_inside_functions() -> None:
    tree = ast.parse("def f():\n    from node.cli import main\n    import hivemind.p2p")
    assert imported(tree) == {"node", "hivemind"}


def test_packages_are_found() -> None:
    assert {param.values[0] for param in FILES} == set(MAY_IMPORT)
    assert len(CORE) > 10 and len(BENCHMARKS) > 10


def _requirements() -> list[Requirement]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    return [Requirement(line) for text in lists for line in text.split("\n") if line.strip()]


@pytest.mark.parametrize("needed", _requirements(), ids=lambda needed: str(needed.name))
def test_every_dependency_has_bounds_around_what_was_tried(needed: Requirement) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tried = dict(line.split("==") for line in lines if "==" in line)
    assert {bound.operator for bound in needed.specifier} == {">=", "<"}
    assert needed.specifier.contains(tried[needed.name])
