"""How large the package is, and how tidy: what grows back unless somebody counts.

    python -m benchmarks.house [--write]

Prints the lines and files of each room, then the counts of the whole package. `--write` stores them in
benchmarks/results/house.json; a test fails when a count is larger than the stored one, so that whoever raises one does
it on purpose, and says why in the same commit.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import result_line

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "stormo"
STORED = Path(__file__).with_name("results") / "house.json"
SHORT_LINES = 60
# Documented by torch and Python, in spite of the underscore.
PUBLIC = re.compile(r"_foreach_\w+|_saved_\w+|_exit|_getframe|_current_frames|_asdict")
STRATEGIES = {"dp", "ddp", "local", "server", "zero1", "zero2", "fsdp", "hsdp", "hybrid", "pipeline", "naive", "tensor"}
STRATEGY_ROOMS = ("parallel", "config/strategies.py", "config/schema.py")


@dataclass(frozen=True)
class Module:
    """A file of the package."""

    path: Path  # below the package
    num_lines: int
    tree: ast.Module

    @property
    def dotted(self) -> str:
        """As it is imported."""
        return ".".join(("stormo", *self.path.with_suffix("").parts)).removesuffix(".__init__")

    @property
    def room(self) -> str:
        """The entry at the top of the package that it belongs to."""
        return self.path.parts[0]


def read_package(package: Path = PACKAGE) -> list[Module]:
    """All files, in the order of their names."""
    modules = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        modules.append(Module(path.relative_to(package), len(text.splitlines()), ast.parse(text)))
    return modules


def counts(modules: list[Module]) -> dict[str, int]:
    """Everything that a test keeps from growing."""
    own = own_private_names(modules)
    names = Counter(module.path.name for module in modules if not module.path.name.startswith("__"))
    return {
        "lines": sum(module.num_lines for module in modules),
        "files": len(modules),
        "entries": len({module.room for module in modules}),
        "short_files": sum(module.num_lines < SHORT_LINES for module in modules if module.path.name != "__init__.py"),
        "longest_function": max(length for module in modules for length in function_lengths(module.tree)),
        "repeated_names": sum(count > 1 for count in names.values()),
        "private": sum(len(list(private_names(module.tree, own))) for module in modules),
        "strategy_names": sum(len(list(strategy_names(module))) for module in modules),
        "cycles": len(cycles(import_graph(modules))),
    }


def rooms(modules: list[Module]) -> dict[str, dict[str, int]]:
    """Lines and files of each entry at the top."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"lines": 0, "files": 0})
    for module in modules:
        found[module.room]["lines"] += module.num_lines
        found[module.room]["files"] += 1
    return dict(found)


def function_lengths(tree: ast.AST) -> Iterator[int]:
    """Lines of every function, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def own_private_names(modules: list[Module]) -> frozenset[str]:
    """Every name with an underscore that the package itself gives to something."""
    found = set[str]()
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(name for name in found if name.startswith("_"))


def private_names(tree: ast.AST, own: frozenset[str] = frozenset()) -> Iterator[str]:
    """Names of other packages that are not for us, and classes that are exchanged under an object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "stormo":
            parts = (node.module or "").split(".")
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if any(map(_is_private, [*parts, alias.name]))
            )
        elif isinstance(node, ast.Attribute):
            is_of_torch = _root(node) in {"torch", "dist", "nn"}
            if (
                _is_private(node.attr)
                and (is_of_torch or (node.attr not in own and _root(node) not in {"self", "cls"}))
            ) or (node.attr == "__class__" and isinstance(node.ctx, ast.Store)):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"torch\._\w+$", node.value):
            yield node.value


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not PUBLIC.fullmatch(name)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def strategy_names(module: Module) -> Iterator[str]:
    """Comparisons with a strategy's name where nobody should ask for it."""
    if str(module.path).startswith(STRATEGY_ROOMS):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Compare) and "strategy" in ast.dump(node.left):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Constant) and inner.value in STRATEGIES:
                    yield str(inner.value)


def import_graph(modules: list[Module]) -> dict[str, set[str]]:
    """Who imports whom when it is itself imported: inside functions and for type checkers does not count."""
    known = {module.dotted for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        found = graph[module.dotted] = set()
        for node in module.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name if name in known else node.module for name in names} & known
        found.discard(module.dotted)
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import one another in a circle, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            first = stack.index(name)
            if len(stack) - first > 1:
                found.append(sorted(stack[first:]))
            del stack[first:]

    for name in graph:
        if name not in order:
            visit(name)
    return found


def main() -> None:
    """Count, show, and store where that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the counts")
    parser.add_argument("--details", action="store_true", help="list private names, repeated file names, cycles")
    options = parser.parse_args()
    modules = read_package()
    by_room, whole = rooms(modules), counts(modules)
    for room, numbers in sorted(by_room.items()):
        print(f"{room:16} {numbers['lines']:6} lines {numbers['files']:4} files")
    if options.details:
        own = own_private_names(modules)
        for module in modules:
            for kind, names in (("private", private_names(module.tree, own)), ("strategy", strategy_names(module))):
                for name in names:
                    print(f"{kind} name in {module.path}: {name}")
        for circle in cycles(import_graph(modules)):
            print("cycle:", " ".join(circle))
    if options.write:
        STORED.write_text(json.dumps({"rooms": by_room, "package": whole}, indent=1) + "\n", encoding="utf-8")
    print(result_line(whole))


if __name__ == "__main__":
    main()
