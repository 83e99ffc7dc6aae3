"""Where workers find classes and functions: modules, files, and the cells of a made-up notebook."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stormo.api.source import find_source, is_plain
from stormo.errors import SettingError
from tests.tiny_task import Tiny


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs cells as a notebook does: in `__main__`, which keeps their text in `In`."""
    main = ModuleType("__main__")
    main.__dict__["In"] = [""]
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(*cells: str) -> Any:
        for cell in cells:
            main.__dict__["In"].append(cell)
            exec(compile(cell, "cell", "exec"), main.__dict__)
        return main

    return run


def _remade(thing: Any) -> Any:
    """What a worker gets."""
    source = find_source(thing)
    module: dict[str, Any] = {"__name__": "cell_task"}
    exec(compile(source.text, "cell_task.py", "exec"), module)
    return module[source.name]


def test_a_module_is_named() -> None:
    source = find_source(Tiny)
    assert (source.place, source.name, source.text) == ("tests.tiny_task", "Tiny", "")


def test_cells_give_what_a_definition_needs_and_no_more(notebook: Any) -> None:
    main = notebook(
        "import math as m, os\nfrom collections import OrderedDict as Ordered",
        "size = 1\nbatch = object()",
        "size += 1",
        "root = m.sqrt(16) + 0j\npath = Ordered(a=root)",
        "@staticmethod\ndef helper(batch):\n    return m.floor(size), path, batch",
        "class Both:\n    own = helper\n\n    def other(self):\n        return Both",
        "first = Both()\nfirst.own(1)",
    )
    remade = _remade(main.Both)
    assert remade.own(7) == (2, {"a": 4 + 0j}, 7)
    text = find_source(main.Both).text
    assert "batch = object()" not in text
    assert "import os" not in text
    assert "first" not in text


def test_functions_may_call_each_other(notebook: Any) -> None:
    even = "def even(n):\n    return n == 0 or odd(n - 1)"
    main = notebook(f"{even}\n\ndef odd(n):\n    return n > 0 and even(n - 1)")
    assert _remade(main.odd)(7)


def test_the_last_cell_wins(notebook: Any) -> None:
    main = notebook("def f():\n    return 1", "def f():\n    return 2")
    main.In.append("def f(:  # a cell that never ran")
    assert _remade(main.f)() == 2


@pytest.mark.parametrize(
    "cell",
    [
        "value = object()\nvalue = [value]",
        "value = {1, object()}\nvalue |= {2}",
        "for value in [object()]: pass",
        "value = [object()]\nvalue[0] = object()",
        "value = [object()]\nother, value[0] = 1, object()",
        "value = {1: object()}\ndel value[1]\nvalue[2] = [object()]",
        "class Value: pass\nvalue = Value()\nvalue.part = 5",
        "class Value: part = 0\nvalue = Value()\nfor _ in range(3):\n    if True: value.part += 1",
        "value = [object()]\nwith open('/dev/null'): value = [object(), 1]",
    ],
)
def test_what_no_statement_makes_again_is_named(notebook: Any, cell: str) -> None:
    main = notebook(cell, "def f():\n    return value")
    with pytest.raises(SettingError) as caught:
        find_source(main.f)
    assert caught.value.what.startswith("f uses value, a ")


def test_what_is_made_again_after_a_change_is_taken(notebook: Any) -> None:
    cells = ["value = [len]", "value[0] = object()", "value = [max]; other = value", "[value for value in 'ab']"]
    main = notebook("import os\nos.environ['STORMO_TEST'] = '1'", *cells, "def f():\n    return other, os.getpid()")
    assert _remade(main.f)()[0] == [max]


def test_a_builtin_that_ipython_replaces_is_pythons_own(notebook: Any) -> None:
    main = notebook("def f():\n    return open")
    main.open = functools.wraps(open)(lambda file: None)  # as IPython does
    assert _remade(main.f)() is open
    main = notebook("for open in [object()]: pass")
    with pytest.raises(SettingError, match="f uses open"):
        find_source(main.f)


def test_lines_end_where_python_ends_them(notebook: Any) -> None:
    main = notebook("text = ['a\u2028b', max]\n\x0c\ndef f():\n    return text, 'a\u2028\x0cb'")
    assert _remade(main.f)() == (["a\u2028b", max], "a\u2028\x0cb")


def test_what_only_the_running_script_defines_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "fit.py"
    file.write_text('def above(): pass\nif __name__ == "__main__":\n    def inside(): pass\n    above = above\n')
    main = ModuleType("__main__")
    main.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(file.read_text(), main.__dict__)
    assert find_source(main.above).place == str(file)
    with pytest.raises(SettingError, match=r"inside of fit\.py was given.*define it at the top level of the file"):
        find_source(main.inside)


def test_a_class_inside_a_statement_is_refused(notebook: Any) -> None:
    main = notebook("if True:\n    class Inside: pass")
    with pytest.raises(SettingError) as caught:
        find_source(main.Inside)
    assert caught.value.what == "Inside was given"


def test_what_is_inside_a_function_is_refused() -> None:
    def inner() -> None: ...

    with pytest.raises(SettingError, match="top level"):
        find_source(inner)


@pytest.mark.parametrize(("value", "expected"), [(1.5, True), ({"a": [1, None]}, True), (float("nan"), False)])
def test_plain_values(value: Any, expected: bool) -> None:
    assert is_plain(value) is expected
    assert not is_plain(object())
