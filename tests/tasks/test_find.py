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


def test_a_class_with_two_names_is_one(tmp_path: Path) -> None:
    path = _file(tmp_path / "found_alias.py", _TASK.format("Net") + "\nDefault = Net\n")
    assert find_task(str(path)).__name__ == "Net"


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
    with pytest.raises(SettingError, match=r"it defines no subclass of stormo\.Task; write class MyTask"):
        find_task(str(path))
    with pytest.raises(SettingError, match=r"it defines no subclass of stormo\.Task; write class MyTask"):
        find_task(f"{path}:Plain")


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
    with pytest.raises(SettingError, match=r"line 1 of found_broken\.py raised .* 'some_package_that_is_absent'; inst"):
        find_task("found_broken:Task")


def test_a_missing_module_whose_name_begins_the_task_is_not_blamed_on_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _file(tmp_path / "foundlib_task.py", "import foundlib\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=r"line 1 of foundlib_task\.py raised ModuleNotFoundError: .* 'foundlib'; "):
        find_task("foundlib_task:Task")


def test_a_plain_word_is_refused_with_the_choices() -> None:
    with pytest.raises(SettingError) as caught:
        find_task("fashion-mnst")
    assert str(caught.value) == (
        "task 'fashion-mnst' was asked for, but there is none of that name; did you mean fashion-mnist? "
        "choose one of: FILE.py, fashion-mnist, language-model, package.module:Class."
    )


def test_the_file_beside_a_wrong_name_is_proposed_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _file(tmp_path / "found_beside.py", "raise AssertionError('it was imported')\n")
    _file(tmp_path / "found_text.txt", "no program\n")
    monkeypatch.chdir(tmp_path)
    for name, answer in {
        "found_beside": r"did you mean found_beside\.py\?",
        "found_beside.txt": r"but found_beside is a module that holds no others; name found_beside\.py\.",
        "found_text.txt": r"but it is no Python file; name a file that ends in \.py, or a module\.",
    }.items():
        with pytest.raises(SettingError, match=answer):
            find_task(name)


@pytest.mark.parametrize("name", [".", "..", ":Class"])
def test_what_cannot_be_a_module_is_answered_with_the_choices(name: str) -> None:
    with pytest.raises(SettingError, match=r"there is none of that name; choose one of: FILE\.py, fashion-mnist"):
        find_task(name)


def _told(path: Path) -> list[str]:
    with pytest.raises(SettingError) as caught:
        find_task(str(path))
    return str(caught.value).splitlines()


def test_an_error_in_the_file_is_shown_with_the_lines_of_the_user_alone(tmp_path: Path) -> None:
    neighbour = _file(tmp_path / "found_divider.py", "def divide(x):\n    return 1 / x\n")
    path = _file(tmp_path / "found_dividing.py", "from found_divider import divide\n\ndivide(0)\n")
    lines = _told(path)
    assert lines[0] == (
        f"the task {path} was named, but line 2 of found_divider.py raised ZeroDivisionError: division by zero; "
        "fix that line."
    )
    places = [line.strip() for line in lines if line.startswith("  File")]
    assert places == [f'File "{path}", line 3, in <module>', f'File "{neighbour}", line 2, in divide']
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_a_script_that_ends_the_process_when_imported_is_named(tmp_path: Path) -> None:
    path = _file(tmp_path / "found_exit.py", "import sys\n\nsys.exit(3)\n")
    script = 'put what only a script does under if __name__ == "__main__":.'
    assert _told(path) == [
        f"the task {path} was named, but line 3 of found_exit.py ends the process when it is imported; {script}"
    ]
    path = _file(tmp_path / "found_flags.py", "import argparse\n\nargparse.ArgumentParser().parse_args(['--flag'])\n")
    assert _told(path) == [
        f"the task {path} was named, but line 3 of found_flags.py ends the process when it is imported; {script}"
    ]


def test_an_error_made_for_users_stays_as_it_is(tmp_path: Path) -> None:
    text = (
        "from stormo.errors import SettingError\n\nraise SettingError('it was set', 'it cannot be', 'leave it out')\n"
    )
    assert _told(_file(tmp_path / "found_setting.py", text)) == ["it was set, but it cannot be; leave it out."]


@pytest.mark.parametrize(
    "start", ["import stormo\nworld = stormo.World()", "from stormo import World\nworld = World()"]
)
def test_a_script_with_its_own_training_loop_is_not_run(tmp_path: Path, start: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text(f"{start}\nraise SystemExit('it ran')\n", encoding="utf-8")
    with pytest.raises(SettingError, match=r"uses stormo.World and holds no stormo.Task; run it by stormo run .*"):
        find_task(str(script))
