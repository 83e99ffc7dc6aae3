"""The corpus: found on this machine, split by path alone, the same bytes every time."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from stormo.errors import SettingError
from stormo.tasks import python_source
from stormo.tasks.python_source import is_validation, read_corpus


def _write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def _names(is_for_validation: bool, count: int) -> list[str]:
    names = (f"part{number}.txt" for number in range(1000))
    return [name for name in names if is_validation(name) is is_for_validation][:count]


def test_this_machine_has_the_corpus_and_about_a_twentieth_is_for_validation() -> None:
    corpus = read_corpus()
    assert len(corpus.train) > 5_000_000
    assert 0.02 < len(corpus.validation) / len(corpus.train) < 0.10
    assert corpus.num_files > 300
    assert b"import " in corpus.validation
    again = read_corpus()
    assert (again, again.sha256) == (corpus, corpus.sha256)


def test_installed_packages_tests_and_what_this_build_wrote_are_not_in_it() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    names = python_source._library_files(root)
    assert {"abc.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "tkinter"}
    assert not [name for name in names if name.startswith(("_sysconfigdata", "config-", "sitecustomize"))]
    assert names == sorted(names)


def test_a_file_stays_in_its_part_whatever_else_is_there(tmp_path: Path) -> None:
    train, validation = _names(False, 3), _names(True, 2)
    few = read_corpus(_write(tmp_path / "few", {train[0]: b"aaa", validation[0]: b"bbb"}))
    assert (few.train, few.validation, few.num_files) == (b"aaa", b"bbb", 2)
    files = {train[0]: b"aaa", validation[0]: b"bbb", train[1]: b"cc", train[2]: b"dd", validation[1]: b"ee"}
    more = read_corpus(_write(tmp_path / "more", files))
    assert b"aaa" in more.train
    assert b"bbb" in more.validation
    assert (len(more.train), len(more.validation)) == (7, 5)
    assert more.sha256 != few.sha256


def test_a_byte_that_changes_sides_changes_the_digest() -> None:
    def corpus(train: bytes, validation: bytes) -> str:
        return python_source.Corpus(train=train, validation=validation, num_files=2, origin="x").sha256

    assert corpus(b"ab", b"c") != corpus(b"a", b"bc")


def test_a_given_folder_gives_its_py_and_txt_files_and_those_below(tmp_path: Path) -> None:
    train, validation = _names(False, 1)[0], _names(True, 1)[0]
    nested = next(f"tests/{n}.py" for n in range(1000) if not is_validation(f"tests/{n}.py"))
    files = {train: b"a", validation: b"b", nested: b"c", "notes.md": b"x", "__pycache__/x.py": b"x"}
    corpus = read_corpus(_write(tmp_path, files))
    assert sorted(corpus.train) == sorted(b"ac")
    assert corpus.validation == b"b"
    assert str(tmp_path) in corpus.origin


def test_a_python_without_sources_says_what_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(SettingError) as caught:
        read_corpus()
    assert str(caught.value) == (
        "the sources of Python's standard library are trained on, but there are none in "
        f"{tmp_path / 'python311.zip'} (*.py, 0 files found): this Python was installed without them; "
        "set --task.data-folder to any folder of *.py or *.txt files."
    )


def test_a_folder_with_nothing_for_one_part_is_refused_with_the_count(tmp_path: Path) -> None:
    _write(tmp_path, {_names(False, 1)[0]: b"aaa"})
    with pytest.raises(SettingError, match=r"its \*\.py and \*\.txt files \(1\) make 3 bytes for training and 0 for "):
        read_corpus(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    train, validation = _names(False, 2), _names(True, 1)
    _write(tmp_path, {train[0]: b"a", validation[0]: b"b"})
    (tmp_path / train[1]).symlink_to(tmp_path / "absent")
    with pytest.raises(SettingError, match=rf"{train[1]} cannot be read \(No such file or directory\)"):
        read_corpus(tmp_path)


def test_sizes_are_found_without_torch() -> None:
    program = (
        "import sys; from stormo.tasks.language_model import LanguageModel, LanguageModelOptions as O; "
        "LanguageModel(O()).facts(); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
