"""The size of the package, which must not grow unnoticed."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from benchmarks import house


@pytest.fixture(scope="module")
def modules() -> list[house.Module]:
    return house.read_package()


def test_nothing_has_grown_unnoticed(modules: list[house.Module]) -> None:
    stored = json.loads(house.STORED.read_text(encoding="utf-8"))
    by_room, whole = house.rooms(modules), house.counts(modules)
    grown = [
        f"{name} {count} > {stored['package'][name]}"
        for name, count in whole.items()
        if count > stored["package"][name]
    ]
    for room, numbers in by_room.items():
        before = stored["rooms"].get(room, {"lines": 0, "files": 0})
        grown += [f"{room} {kind} {count} > {before[kind]}" for kind, count in numbers.items() if count > before[kind]]
    assert not grown, (
        f"{grown}: take something out, or store the counts (`python -m benchmarks.house --write`) and say why"
    )


def test_the_architecture_page_lists_every_private_name(modules: list[house.Module]) -> None:
    page = (house.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Private names")[2]
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| `")]
    own = house.own_private_names(modules)
    found = {(str(module.path), name) for module in modules for name in house.private_names(module.tree, own)}
    missing = {
        (path, name)
        for path, name in found
        if not any(re.search(rf"[`.]{re.escape(name.rpartition('.')[2])}\b", row[0]) and path in row[1] for row in rows)
    }
    assert not missing
    assert all((house.ROOT / test).is_file() for row in rows for test in re.findall(r"tests/[\w/]+\.py", row[-1]))


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("torch._C._cuda_x()", ["_cuda_x", "_C"]),
        ("layer.__class__ = Other", ["__class__"]),
        ("tensor._local_tensor", ["_local_tensor"]),
        ("sys.modules['torch._dynamo']", ["torch._dynamo"]),
        ("torch._foreach_add_(a, b); os._exit(0); self._x; other._x", []),
    ],
)
def test_private_names_are_found(code: str, names: list[str]) -> None:
    assert list(house.private_names(ast.parse(code), frozenset(["_x"]))) == names


def test_circles_and_comparisons_are_found(tmp_path: Path) -> None:
    assert house.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    (tmp_path / "room.py").write_text("def f():\n    return x.strategy in ('ddp', 'other')\n", encoding="utf-8")
    (module,) = house.read_package(tmp_path)
    assert list(house.strategy_names(module)) == ["ddp"]
    assert list(house.function_lengths(module.tree)) == [2]
