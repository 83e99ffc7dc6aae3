"""Nothing in the package unpickles what may come over a network: a pickle runs whatever its maker wants."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "stormo"
# What unpickles, by the last name of a call or an import.
FORBIDDEN = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "Unpickler",
}
OF_MODULES = {  # names that other modules have too
    "pickle": {"load", "loads"},
    "torch": {"load"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "cloudpickle": {"load", "loads"},
    "dill": {"load", "loads"},
}
ALLOWED = {"data/processes.py"}  # between a worker and its own loading processes, through their pipes


def unpickling(tree: ast.AST) -> list[str]:
    found, safe = [], set[ast.AST]()
    for node in ast.walk(tree):  # a call before its function
        if isinstance(node, ast.Call) and any(_is_weights_only(each) for each in node.keywords):
            safe.add(node.func)
        elif isinstance(node, ast.Attribute) and node not in safe:
            is_of_module = isinstance(node.value, ast.Name) and node.attr in OF_MODULES.get(node.value.id, ())
            if node.attr in FORBIDDEN or is_of_module:
                found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            bad = names & (FORBIDDEN | OF_MODULES.get(node.module or "", set()))
            found += [f"line {node.lineno}: {name}" for name in bad]
    return found


def _is_weights_only(keyword: ast.keyword) -> bool:
    """Whether it is torch's `weights_only=True`: then only tensors and plain containers are read."""
    return keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True


def test_no_module_unpickles() -> None:
    found = {str(file.relative_to(PACKAGE)): unpickling(ast.parse(file.read_text())) for file in PACKAGE.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines and name not in ALLOWED} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\npickle.loads(b'')",
        "from pickle import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "dist.broadcast_object_list(x)",
        "from torch.distributed import all_gather_object as harmless",
    ],
)
def test_it_would_be_seen(code: str) -> None:
    assert unpickling(ast.parse(code))
