"""docs/strategies.md: its commands can be read and say what it shows; those that go on under another mesh are run."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from stormo.cli import main
from stormo.telemetry.folder import RunFolder, write_json
from tests import programs
from tests.docs.test_your_own_model import matches
from tests.report.made_run import made_pass

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
BLOCKS = [
    [(command, [line for line in rest.split("\n") if line]) for command, _, rest in parts]
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for parts in [[part.partition("\n") for part in block.split("$ ")[1:]]]
]
(RESUMED,) = (block for block in BLOCKS if any("--resume" in command for command, _ in block))
COMMANDS = [pair for block in BLOCKS if block is not RESUMED for pair in block]
# A plan that is shown in a block of its own behind its command.
PLANS = re.findall(r"```console\n\$ (stormo train .*--dry-run)\n```\n\n```\n(.*?)\n```", PAGE, re.DOTALL)
REFUSALS = re.findall(r"^\| `(--.*?)` \| (--.*? was set.*) \|$", PAGE, re.MULTILINE)
(IDEAL, SHOWN_IDEAL), (REAL, SHOWN_REAL) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    dry = [] if "--dry-run" in words else ["--dry-run"]
    code = main([*words, *dry])
    captured = capsys.readouterr()
    return code, captured.err.strip() or captured.out.strip()


def test_nothing_is_left_out() -> None:
    assert len(COMMANDS) >= 15
    assert len(REFUSALS) >= 10
    assert len(PLANS) == 1
    strategies = set(re.findall(r"--strategy (\w+)", " ".join(command for command, _ in COMMANDS)))
    assert strategies == {"ddp", "local", "server", "zero1", "zero2", "fsdp", "hsdp", "tensor", "hybrid", "pipeline"}


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_command_can_be_read_or_says_what_is_shown(
    command: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = shlex.split(command)
    assert program == "stormo"
    code, said = answer(words, capsys)
    assert (code, said) == (2, "\n".join(shown)) if shown else code == 0, said


def test_the_plan_is_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    ((command, shown),) = PLANS
    _, said = answer(command.split()[1:], capsys)
    assert set(shown.splitlines()) <= set(said.splitlines())


@pytest.mark.parametrize(("flags", "shown"), REFUSALS, ids=[flags for flags, _ in REFUSALS])
def test_refusals_are_as_shown(flags: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "examples/wide.py", "--device", "cpu", "--num-gpus", "4", *flags.split()]
    assert answer(words, capsys) == (2, f"stormo: {shown}")


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(IDEAL, "docs/strategies.md", "exec"), {})
    assert capsys.readouterr().out == SHOWN_IDEAL
    folder = RunFolder(tmp_path / "runs" / "1f1b")
    folder.path.mkdir(parents=True)
    write_json(folder.summary, {"pipeline": made_pass("1f1b", num_workers=2, micro_batches=4)})
    monkeypatch.chdir(tmp_path)
    exec(compile(REAL, "docs/strategies.md", "exec"), {})
    one, other = capsys.readouterr().out.splitlines()
    assert len(re.findall(r"F\d|B\d", one)) == len(re.findall(r"F\d|B\d", other)) == 8
    # In the runs that are shown both workers have done everything once.
    for worker in re.findall(r"^worker \d \| (.*)", SHOWN_REAL, re.MULTILINE):
        assert len(re.findall(r"[FBIW]\d", worker)) == len(set(re.findall(r"[FBIW]\d\w?", worker)))


def test_what_a_task_can_say_is_in_the_example() -> None:
    (code,) = re.findall(r"```python\n(class Wide.*?)```", PAGE, re.DOTALL)
    example = (ROOT / "examples" / "wide.py").read_text(encoding="utf-8")
    for method in re.split(r"\n\n", code.split("\n", 1)[1]):
        assert textwrap.indent(textwrap.dedent(method).strip(), "    ") in example


def test_a_run_goes_on_under_another_mesh_and_is_exported(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command, shown in RESUMED:
        _, *words = command.split()
        num_ranks = int(words[words.index("--num-gpus") + 1]) if "--num-gpus" in words else 1
        done = programs.run(["-m", "stormo", *words], tmp_path, num_ranks)
        assert done.returncode == 0, done.stderr
        printed = [line for line in done.stdout.splitlines() if not line.startswith("Energy: ")]
        assert matches(printed, shown), done.stdout
    assert (tmp_path / "wide-step-00000064.safetensors").is_file()
