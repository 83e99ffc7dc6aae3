"""The code of the pages and of examples/ is run, and prints what the pages show."""

from __future__ import annotations

import difflib
import itertools
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

import stormo.energy
from tests import programs
from tests.docs.pages import DOCS, PAGES, ROOT, Command, commands, read

EXAMPLES = ROOT / "examples"
OWN = [DOCS / "your-own-model.md", DOCS / "scripts.md"]
TEXT = "".join(map(read, OWN))
FILES = dict(re.findall(r"<!-- (\S+\.py) -->\n```python\n(.*?)```", TEXT, re.DOTALL))
COMMANDS = [command for page in OWN for command in commands(page)]
BLOCKS = [list(block) for _, block in itertools.groupby(COMMANDS, lambda command: command.around)]


def test_no_block_is_left_out() -> None:
    assert TEXT.count("```") == 2 * (len(FILES) + TEXT.count("```console"))
    assert len(COMMANDS) == 15


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[0].text)
def test_commands_print_what_the_page_shows(block: list[Command], tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for command in block:
        _check(_run(command.text, tmp_path), command)


def test_a_run_resumes_under_another_mesh_and_is_exported(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (resumed,) = (one for one in commands(DOCS / "strategies.md") if "--resume" in one.text)
    for command in commands(DOCS / "strategies.md"):
        if "wide" in command.text and command.around == resumed.around:
            _check(_run(command.text, tmp_path), command)
    assert (tmp_path / "wide-step-00000064.safetensors").is_file()


def _run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`python` and `stormo run` start the script, other verbs the module; `--num-gpus` is the number of ranks."""
    program, *words = text.split()
    flag = words.index("--num-gpus") if "--num-gpus" in words and "--dry-run" not in words else None
    num_ranks = 1 if flag is None else int(words[flag + 1])
    if program == "python" or words[0] == "run":
        return programs.run([word for word in words if word.endswith(".py")], folder, num_ranks)
    return programs.run(["-m", "stormo", *words], folder, num_ranks)


def _check(done: subprocess.CompletedProcess[str], command: Command) -> None:
    """On a page `…` stands for any text within a line, and alone for any lines; the energy is not shown."""
    assert done.returncode == 0, done.stderr
    printed = "".join(f"{line}\n" for line in done.stdout.splitlines() if not line.startswith("Energy: "))
    shown = command.output
    parts = [r"(?:.*\n)*?" if line == "…" else ".*?".join(map(re.escape, line.split("…"))) + "\n" for line in shown]
    assert re.fullmatch("".join(parts), printed), done.stdout


def test_five_lines_and_the_import() -> None:
    """Of each pair in examples/, and of the page, whose script has a second loader."""
    pairs = [(FILES["train.py"], FILES["train_world.py"], 6)]
    for name in ("resnet", "regression"):
        plain, world = (read(EXAMPLES / f"{name}_{kind}.py") for kind in ("plain", "world"))
        pairs.append((plain.partition("\n")[2], world.partition("\n")[2], 5))
    for plain, world, most in pairs:
        difference = list(difflib.unified_diff(plain.splitlines(), world.splitlines(), lineterm="", n=0))[2:]
        changed = [line for line in difference if line.startswith("+") and line not in ("+", "+import stormo")]
        removed = [line for line in difference if line.startswith("-")]
        assert len(changed) <= most, changed
        assert len(removed) <= most - 2, removed


@pytest.mark.parametrize("name", ["resnet", "regression"])
def test_a_converted_example_agrees_with_the_original(name: str, tmp_path: Path) -> None:
    original = _numbers(tmp_path / f"{name}_plain.py")
    assert original[-1] < 0.5 * original[0]  # it does learn
    converted = tmp_path / f"{name}_world.py"
    assert _numbers(converted) == original
    assert _numbers(converted, 3) == pytest.approx(original, rel=1e-10)


def _numbers(path: Path, num_workers: int = 1) -> list[float]:
    """The printed numbers of an example, in double precision and in full."""
    text = read(EXAMPLES / path.name)
    text = text.replace("torch.manual_seed(0)", "torch.set_default_dtype(torch.float64)\ntorch.manual_seed(0)")
    path.write_text(re.sub(r":\.\df\}", ":.15g}", text), encoding="utf-8")
    done = programs.run([path.name], path.parent, num_workers)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines()]


def test_the_methods_of_a_task_are_those_of_the_example() -> None:
    (code,) = re.findall(r"```python\n(class Wide.*?)```", read(DOCS / "strategies.md"), re.DOTALL)
    example = read(EXAMPLES / "wide.py")
    for method in re.split(r"\n\n", code.split("\n", 1)[1]):
        assert textwrap.indent(textwrap.dedent(method).strip(), "    ") in example


def test_a_layerwise_optimizer_learns(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", read(DOCS / "optimizers.md"), re.DOTALL)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    done = programs.run(["train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[0]


def test_ghost_batch_norm_counts_its_ghosts(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", read(DOCS / "large-batches.md"), re.DOTALL)
    exec(compile(code, "docs/large-batches.md", "exec"), {})
    assert capsys.readouterr().out == "tensor(4)\n"


def test_what_the_pages_import_from_stormo_is_there() -> None:
    found = {line for page in PAGES for line in re.findall(r"^from stormo\S* import .*$", read(page), re.MULTILINE)}
    assert len(found) > 5
    exec("\n".join(sorted(found)), {})
    assert callable(stormo.energy.read_bill)  # named in a sentence of docs/your-own-model.md
