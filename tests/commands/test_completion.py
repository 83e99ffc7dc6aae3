"""The scripts of `stormo completion`, run by the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stormo.cli import _VERBS, main
from stormo.config.options import train_options
from stormo.errors import EXIT_USAGE

_SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each shell's script, from one process that must not have imported torch."""
    folder = tmp_path_factory.mktemp("completion")
    code = (
        "import contextlib, sys\nfrom stormo.cli import main\n"
        f"for shell in {_SHELLS}:\n"
        "    with open(f'{sys.argv[1]}/{shell}', 'w') as file, contextlib.redirect_stdout(file):\n"
        "        assert main(['completion', shell]) == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    return {shell: folder / shell for shell in _SHELLS}


def _in_shell(shell: str, *arguments: str) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    return subprocess.run([shell, *arguments], check=True, capture_output=True, text=True).stdout


def _completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    call = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _stormo; printf "%s\\n" "${COMPREPLY[@]}"'
    return _in_shell("bash", "-c", call, str(script), "stormo", *words).split()


def test_bash_registers_the_function(scripts: dict[str, Path]) -> None:
    shown = _in_shell("bash", "-c", 'source "$0"; complete -p stormo', str(scripts["bash"]))
    assert shown == "complete -o default -F _stormo stormo\n"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["train"]),
        (["train", "--num-"], ["--num-gpus", "--num-nodes"]),
        (["train", "--no-comp"], ["--no-compile"]),
        (["train", "--strategy", "z"], ["zero1", "zero2"]),
        (["train", "--strategy", "=", "f"], ["fsdp"]),
        (["train", "--strategy", "="], ["auto"]),
        (["train", "--batch-size", ""], ["auto"]),
        (["train", "fash"], ["fashion-mnist"]),
        (["train", "my_"], []),
        (["train", "--config", ""], ["fashion-mnist", "language-model"]),
        (["submit", "--partit"], ["--partition"]),
        (["submit", "--base-l"], ["--base-lr"]),
        (["scale", "--repe"], ["--repeats"]),
        (["predict", "--network", "s"], ["slow"]),
        (["run", "--num-n"], ["--num-nodes"]),
        (["run", "--base-l"], []),
        (["completion", "f"], ["fish"]),
        (["quux", "--"], []),
    ],
)
def test_bash_completes(scripts: dict[str, Path], words: list[str], offered: list[str]) -> None:
    assert _completed(scripts["bash"], *words)[: max(len(offered), 1)] == offered


def test_every_verb_and_every_flag_of_train_is_offered(scripts: dict[str, Path]) -> None:
    assert _completed(scripts["bash"], "") == [*_VERBS]
    flags = {option.flag for option in train_options()} | {"--help"}
    flags |= {f"--no-{option.flag[2:]}" for option in train_options() if option.kind is bool}
    assert {*_completed(scripts["bash"], "train", "--")} == flags
    for option in train_options():
        if option.choices:
            assert _completed(scripts["bash"], "train", option.flag, "") == [*option.choices]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_script(scripts: dict[str, Path], shell: str) -> None:
    _in_shell(shell, "-n", str(scripts[shell]))


def test_fish_completes(scripts: dict[str, Path]) -> None:
    script = f"source {scripts['fish']}; complete -C 'stormo train --strategy z'"
    assert _in_shell("fish", "-c", script).split() == ["zero1", "zero2"]


def test_an_unknown_shell_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == EXIT_USAGE
    assert "bash, fish, zsh" in capsys.readouterr().err
