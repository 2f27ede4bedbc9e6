"""The architecture: protocol <- swarm <- node; a core with no clock, pickle or global generator."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "protocol": {"protocol"},
    "swarm": {"protocol", "swarm"},
    "node": {"protocol", "swarm", "node"},
}
OURS = {"protocol", "swarm", "node", "benchmarks", "tests"}
NETWORK = {"hivemind", "libp2p", "multiaddr", "uvloop", "trio", "socket", "ssl", "socketserver"}
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
DRAWS = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal", "poisson"}
FILES = [
    pytest.param(package, path, id=str(path.relative_to(ROOT)))
    for package in MAY_IMPORT
    for path in sorted((ROOT / package).rglob("*.py"))
]
CORE = [param for param in FILES if param.values[0] != "node"]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.AST, package: str = "") -> set[str]:
    """Top-level names of everything that is imported, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0] if node.level == 0 else package)
    return found


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
    if name in {"eval", "exec", "__import__", "torch.load", "torch.save"}:
        yield f"line {node.lineno}: {name}("
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


@pytest.mark.parametrize(("package", "path"), FILES)
def test_nothing_unsafe_is_imported(package: str, path: Path) -> None:
    assert not imported(_tree(path)) & UNSAFE


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
        "eval('1')",
        "import random\nrandom.choice([1])",
        "import random\nrandom.Random()",
        "from random import choice",
        "import numpy as np\nnp.random.rand(3)",
        "import numpy as np\nnp.random.default_rng()",
        "import torch\ntorch.randn(3)",
        "import torch\ntorch.manual_seed(0)",
        "import torch\ntorch.load('x')",
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
        "model.eval()",
    ],
)
def test_the_check_allows(source: str) -> None:
    assert not list(complaints(ast.parse(source)))


def test_the_check_sees_imports_inside_functions() -> None:
    tree = ast.parse("def f():\n    from node.cli import main\n    import hivemind.p2p")
    assert imported(tree) == {"node", "hivemind"}


def test_packages_are_found() -> None:
    assert {param.values[0] for param in FILES} == set(MAY_IMPORT)
    assert len(CORE) > 10
