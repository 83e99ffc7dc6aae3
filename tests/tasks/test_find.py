"""Tasks by name, by file and by import path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stormo.errors import SettingError
from stormo.tasks.find import TASKS, find_task

_TASK = "from stormo.tasks.task import Task\n\nclass {}(Task):\n    pass\n"


@pytest.fixture(autouse=True)
def _imports_as_before() -> Iterator[None]:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]


def _file(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_built_in_task_is_found_by_its_own_name() -> None:
    for name in TASKS:
        assert find_task(name).name == name


def test_a_file_with_one_task_is_enough(tmp_path: Path) -> None:
    path = _file(tmp_path / "found_alone.py", _TASK.format("Alone"))
    assert find_task(str(path)).__name__ == "Alone"


def test_imported_task_classes_do_not_count(tmp_path: Path) -> None:
    text = "from stormo.tasks.fashion_mnist import FashionMnist\n\nclass Mine(FashionMnist):\n    pass\n"
    assert find_task(str(_file(tmp_path / "found_subclass.py", text))).__name__ == "Mine"


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    _file(tmp_path / "found_neighbour.py", "NAME = 'next door'\n")
    path = _file(tmp_path / "found_user.py", "from found_neighbour import NAME\n" + _TASK.format("User"))
    assert find_task(str(path)).__name__ == "User"


def test_one_class_of_several_is_chosen_by_name(tmp_path: Path) -> None:
    path = _file(tmp_path / "found_two.py", _TASK.format("One") + _TASK.format("Two"))
    assert find_task(f"{path}:Two").__name__ == "Two"
    with pytest.raises(SettingError) as caught:
        find_task(str(path))
    assert str(caught.value) == (
        f"the task {path} was named, but it defines 2 task classes (One, Two); "
        f"name one as {path}:Class, a subclass of stormo.Task."
    )
    with pytest.raises(SettingError, match=r"task class of found_two 'Tow' was asked for, .* did you mean Two\?"):
        find_task(f"{path}:Tow")


def test_a_file_without_a_task_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path / "found_none.py", "class Plain:\n    pass\n")
    with pytest.raises(SettingError, match="it defines 0 task classes; name one as"):
        find_task(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"absent\.py was named, but there is no such file; check the path\."):
        find_task(str(tmp_path / "absent.py"))


def test_an_import_path_with_and_without_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "found_package"
    package.mkdir()
    _file(package / "__init__.py", "")
    _file(package / "tasks.py", _TASK.format("Packaged"))
    monkeypatch.chdir(tmp_path)  # the current folder counts, as with `python -m`
    assert find_task("found_package.tasks:Packaged").__name__ == "Packaged"
    assert find_task("found_package.tasks").__name__ == "Packaged"
    with pytest.raises(SettingError, match=r"no module found_package\.other can be imported"):
        find_task("found_package.other:Packaged")
    with pytest.raises(SettingError, match="no module found_absent can be imported"):
        find_task("found_absent.tasks:Packaged")


def test_a_module_missing_inside_the_task_is_not_blamed_on_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _file(tmp_path / "found_broken.py", "import some_package_that_is_absent\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="some_package_that_is_absent"):
        find_task("found_broken:Task")


def test_a_missing_module_whose_name_begins_the_task_is_not_blamed_on_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _file(tmp_path / "foundlib_task.py", "import foundlib\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="foundlib"):
        find_task("foundlib_task:Task")


def test_a_plain_word_is_refused_with_the_choices() -> None:
    with pytest.raises(SettingError) as caught:
        find_task("fashion-mnst")
    assert str(caught.value) == (
        "task 'fashion-mnst' was asked for, but there is none of that name; did you mean fashion-mnist? "
        "choose one of: FILE.py, fashion-mnist, package.module:Class."
    )


@pytest.mark.parametrize("name", [".", "..", ":Class"])
def test_what_cannot_be_a_module_is_answered_with_the_choices(name: str) -> None:
    with pytest.raises(SettingError, match=r"there is none of that name; choose one of: FILE\.py, fashion-mnist"):
        find_task(name)
