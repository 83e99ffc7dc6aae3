"""Finds where workers get a class or function from: its module, its file, or the code of notebook cells.

A notebook has no file to import. Its cells give the definition, and whatever that needs: imports, other definitions,
plain values as they are now, and for other values the statement that made them.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from stormo.errors import SettingError

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_DEFINITIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where something is defined."""

    name: str
    place: str | None = None  # a module, or the path of a file
    text: str = ""  # the code, where there is no place


def find_source(thing: Any) -> Source:
    """Where workers find a class or function of this process."""
    name, module = thing.__qualname__, thing.__module__
    if not name.isidentifier():
        why = "a worker finds only what is at the top level of a module, a file or a cell"
        raise SettingError(f"{name} was given", why, "define it there")
    if module != "__main__":
        return Source(name=name, place=module)
    main = sys.modules["__main__"]
    cells = [cell for cell in vars(main).get("In", ()) if isinstance(cell, str)]
    if cells:
        return Source(name=name, text=_Cells(cells, vars(main)).code_of(name))
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if file and Path(file).is_file() and name in _guarded_names(Path(file)):
        why = 'workers import that file without what its if __name__ == "__main__" holds'
        raise SettingError(f"{name} of {Path(file).name} was given", why, "define it at the top level of the file")
    if spec is not None:  # python -m package.module
        return Source(name=name, place=spec.name)
    if file and Path(file).is_file():
        return Source(name=name, place=str(Path(file).resolve()))
    why = "this Python keeps no source of what is typed at its prompt or after -c, and workers need it"
    raise SettingError(f"{name} was given", why, "define it in a file or in a notebook")


def _guarded_names(file: Path) -> set[str]:
    """The names that a file binds only under `if __name__ == "__main__":`."""
    guarded, others = set[str](), set[str]()
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):  # edited since; a worker says so
        return guarded
    for node in body:
        is_guard = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        (guarded if is_guard else others).update(_changed_names(node))
    return guarded - others


class _Cells:
    """The code of notebook cells that one definition needs."""

    def __init__(self, cells: list[str], namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._statements: dict[str, str] = {}  # by the name it binds; the last cell wins
        self._parts: dict[str, str] = {}
        for cell in cells:
            for name, statement in _bindings(cell):
                # os.environ["A"] = "1" sets a part of a module, which workers import all the same.
                if statement or not isinstance(namespace.get(name), ModuleType):
                    self._statements[name] = statement

    def code_of(self, name: str) -> str:
        """The code that defines a name, below all that it needs."""
        self._add(name, needed_by=name)
        return "\n\n".join(part for part in self._parts.values() if part) + "\n"

    def _add(self, name: str, *, needed_by: str) -> None:
        if name in self._parts:
            return
        self._parts[name] = ""  # two functions may call each other
        statement = self._statement(name, needed_by)
        for other in sorted(_global_names(statement)):
            if other != name and other in self._namespace:
                self._add(other, needed_by=name)
        del self._parts[name]
        self._parts[name] = statement

    def _statement(self, name: str, needed_by: str) -> str:
        value = self._namespace[name]
        if is_plain(value):
            return f"{name} = {value!r}"
        if self._statements.get(name):
            return self._statements[name]
        if isinstance(value, ModuleType):
            return f"import {value.__name__} as {name}"
        module, own_name = getattr(value, "__module__", None), getattr(value, "__name__", "")
        if module and module != "__main__" and getattr(sys.modules.get(module), own_name, None) is value:
            return f"from {module} import {own_name} as {name}"
        if hasattr(builtins, name) and name not in self._statements:  # IPython has an open() and an exit() of its own
            return ""
        raise SettingError(
            f"{needed_by} uses {name}, a {type(value).__name__}" if needed_by != name else f"{name} was given",
            "no single statement at the top level of a cell makes it as it is now, so that workers cannot",
            f"define {name} there by one statement",
        )


def _bindings(cell: str) -> Iterator[tuple[str, str]]:
    """The names that a cell binds, each with the code that does; "" where that needs an older value of the name."""
    try:
        body = ast.parse(cell).body
    except (SyntaxError, ValueError):  # a cell that never ran
        return
    lines = cell.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # as Python counts them
    for node in body:
        if isinstance(node, _DEFINITIONS):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            yield node.name, "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                one = ast.Import([alias]) if isinstance(node, ast.Import) else _from(node, alias)
                yield alias.asname or alias.name.partition(".")[0], ast.unparse(one)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            code = ast.get_source_segment(cell, node) or ""
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in _changed_names(target):
                    yield name, "" if name in _global_names(code) else code
        else:
            for name in _changed_names(node):
                yield name, ""


def _changed_names(node: ast.AST) -> Iterator[str]:
    """The names that code binds, and those of which it sets a part (`w[0] = 5`); not those of inner scopes."""
    if isinstance(node, _DEFINITIONS):
        yield node.name
    if isinstance(node, _SCOPES):
        return
    part = node
    if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
        while isinstance(part, ast.Subscript | ast.Attribute):
            part = part.value
        if isinstance(part, ast.Name):
            yield part.id
    for child in ast.iter_child_nodes(node):
        yield from _changed_names(child)


def _from(node: ast.ImportFrom, alias: ast.alias) -> ast.ImportFrom:
    return ast.ImportFrom(node.module, [alias], node.level)


def _global_names(code: str) -> set[str]:
    """The names that a piece of code looks up at the top level; locals of the same name do not count."""
    found: set[str] = set()
    tables = [symtable.symtable(code, "cell", "exec")]
    while tables:
        table = tables.pop()
        is_top = table.get_type() == "module"
        found |= {one.get_name() for one in table.get_symbols() if one.is_referenced() and (is_top or one.is_global())}
        tables += table.get_children()
    return found


def is_plain(value: Any) -> bool:
    """Whether its text makes the same value again: numbers, text, and lists, tuples and dicts of them."""
    if not isinstance(value, bool | int | float | str | bytes | list | tuple | dict | set | None):
        return False
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False
