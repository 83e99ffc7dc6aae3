"""The examples are short, train for an epoch as their first lines say, and use public names of stormo only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import programs
from tests.docs.pages import ROOT, read

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PUBLIC = re.compile(r"stormo|stormo\.(errors|config|data|optim|layers|tasks|energy)(\.\w+)?")
FLAGS = ("--device", "cpu", "--epochs", "1", "--batch-size", "16")
TINY = {
    "segmentation": ("--task.num-images", "32"),
    "diffusion": ("--task.num-images", "32", "--task.width", "4"),
    "gpt": ("--task.num-bytes", "20000", "--task.width", "16"),
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_imports_what_is_public(path: Path) -> None:
    assert len(read(path).splitlines()) < 120
    nodes = list(ast.walk(ast.parse(read(path))))
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert all(PUBLIC.fullmatch(name or "") for name in names if (name or "").startswith("stormo"))


@pytest.mark.parametrize("name", TINY)
def test_a_task_trains(name: str, tmp_path: Path) -> None:
    assert re.search(r"Epoch = 1: .*Validation Loss = \d", _train(name, tmp_path, *TINY[name]))


def test_the_gan_trains_on_two_workers_and_draws(tmp_path: Path) -> None:
    printed = _train("gan", tmp_path, "--task.num-images", "64", "--run-name", "gan", num_workers=2)
    assert "Validation Made Found = " in printed
    done = programs.run([str(ROOT / "examples" / "gan.py"), "gan"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "gan.png").read_bytes().startswith(b"\x89PNG")


def test_a_network_trained_on_images_is_tuned_from_a_file(tmp_path: Path) -> None:
    printed = _train("resnet50", tmp_path, "--run-name", "first")
    assert "Validation Accuracy = " in printed
    assert len([*(tmp_path / "made-up-images").rglob("*.png")]) == 3 * (64 + 16)
    words = ["-m", "stormo", "export", "first", "resnet.safetensors"]
    assert programs.run(words, tmp_path).returncode == 0
    flags = ("--init-from", "resnet.safetensors", "--freeze", "stem.*,blocks.*", "--task.num-images", "64")
    printed = _train("finetune", tmp_path, *flags)
    assert re.search(
        r"--init-from resnet.safetensors: (\d+) of .* 2 of another shape or type \(head.weight, head.bias\)", printed
    )
    assert "330 of " not in printed.partition("are frozen: ")[2]  # the head's weights are trained


def test_a_loop_of_ones_own_resumes(tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / "gpt_world.py"), "--num-bytes", "20000", "--width", "16"]
    first = programs.run([*script, "--epochs", "1"], tmp_path, 2)
    assert first.returncode == 0, first.stderr
    assert re.match(r"epoch 1: validation loss \d\.\d+\ndef ", first.stdout)
    second = programs.run([*script, "--epochs", "2"], tmp_path, 1)
    assert second.stdout.startswith("epoch 2: "), second.stderr


def _train(name: str, folder: Path, *flags: str, num_workers: int = 1) -> str:
    words = ["-m", "stormo", "train", str(ROOT / "examples" / f"{name}.py"), *FLAGS, *flags]
    done = programs.run(words, folder, num_workers)
    assert done.returncode == 0, done.stderr
    return done.stdout
