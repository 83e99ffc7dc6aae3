"""The wheel holds stormo with its pages and templates, nothing else, and its command runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import stormo

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy, as a build leaves files behind, with the build package that constraints.txt names."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "stormo", folder / "stormo", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "benchmarks"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()  # must stay outside
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    (path,) = (folder / "dist").glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "stormo").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as opened:
        held = set(opened.namelist())
        about = message_from_bytes(opened.read(f"stormo-{stormo.__version__}.dist-info/METADATA"))
    assert {name for name in held if ".dist-info/" not in name} == {name for name in files if "__pycache__" not in name}
    assert "stormo/py.typed" in held
    assert about["Version"] == stormo.__version__
    assert "docs" in about.get_all("Provides-Extra", [])


def test_the_command_of_the_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows the packages of this one; this checkout is not among them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "venv"], cwd=tmp_path, check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    said = [_run(python.with_name("stormo"), word, tmp_path) for word in ("--version", "--help")]
    assert said[0].startswith(f"stormo {stormo.__version__}, torch ")
    assert "stormo train [TASK]" in said[1]
    _run(python.with_name("stormo"), "new", tmp_path, "my_task.py")
    template = packages / "stormo" / "tasks" / "templates" / "classification.py"
    assert (tmp_path / "my_task.py").read_text() == template.read_text()


def _run(command: Path, verb: str, folder: Path, *words: str) -> str:
    return subprocess.run([command, verb, *words], cwd=folder, check=True, capture_output=True, text=True).stdout
