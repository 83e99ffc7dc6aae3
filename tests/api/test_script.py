"""`stormo.train` and `stormo.run` in a script and after `python -c`."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import stormo
from stormo.errors import SettingError
from tests import forked
from tests.docs.pages import ROOT
from tests.report.made_run import MadeRun

ENDS_WITHIN_S = 240.0
TASK = """
    import torch
    import stormo
    from torch import nn
    from stormo.data import TensorData

    class Fit(stormo.Task):
        def model(self):
            return nn.Linear(2, 1)

        def train_data(self):
            x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
            return TensorData(x, x.sum(1, keepdim=True))

        validation_data = train_data

        def loss(self, model, batch):
            return nn.functional.mse_loss(model(batch[0]), batch[1])

"""
SETTINGS = 'device="cpu", num_gpus=2, energy=False, tensorboard=False, run_name="fit"'


class Labelled(stormo.Task):
    @dataclass(frozen=True, kw_only=True)
    class Options:
        label: str | None = "a"


def _start(folder: Path, *words: str) -> subprocess.Popen[str]:
    foreign = ("STORMO_", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return forked.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _script(folder: Path, code: str) -> subprocess.Popen[str]:
    (folder / "fit.py").write_text(textwrap.dedent(TASK) + code, encoding="utf-8")
    return _start(folder, "-u", "fit.py")


def test_a_script_trains_its_own_class_resumes_and_reads_the_run(tmp_path: Path) -> None:
    code = f"""
if __name__ == "__main__":
    run = stormo.train(Fit, epochs=1, {SETTINGS})
    run.resume(epochs=2)
    run = stormo.open_run("fit")
    columns = run.history()
    assert {{len(column) for column in columns.values()}} == {{2}}
    assert columns["validation_loss"][-1] == run.summary["validation_loss"]
    assert len(run.plot().axes) == 1
    x, y = Fit().validation_data().tensors
    with torch.no_grad():
        loss = nn.functional.mse_loss(run.load_model()(x), y)
    print("same", abs(float(loss) - run.summary["validation_loss"]) < 1e-6, run.report().relative_to(run.folder))
    print(run, torch.cuda.is_initialized(), torch.distributed.is_initialized())
    (run.folder / "config.toml").write_text("task = [")
    try:
        run.load_model()
    except stormo.errors.SettingError as error:
        print(error.why)
"""
    out, err = _script(tmp_path, code).communicate(timeout=ENDS_WITHIN_S)
    assert out.splitlines()[-3:-1] == ["same True report.html", "<stormo run fit: done> False False"], err
    assert out.splitlines()[-1].startswith("it is not valid TOML")


def test_a_script_without_its_guard_is_told_so(tmp_path: Path) -> None:
    process = _script(tmp_path, f"stormo.train(Fit, epochs=1, {SETTINGS})\n")
    _, err = process.communicate(timeout=ENDS_WITHIN_S)
    assert err.rstrip().splitlines()[-1].startswith("stormo.errors.SettingError: stormo.train() was called in a worker")
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_interrupt_saves_and_ends_all_workers(tmp_path: Path) -> None:
    code = f"""
if __name__ == "__main__":
    try:
        stormo.train(Fit, epochs=100000, {SETTINGS})
    except KeyboardInterrupt:
        print("interrupted", stormo.open_run("fit").summary["stopped_by"], stormo.open_run("fit").state)
"""
    process = _script(tmp_path, code)
    assert process.stdout is not None
    assert any(line.startswith("Epoch = 2:") for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=ENDS_WITHIN_S)
    assert out.splitlines()[-1] == "interrupted signal stopped", err
    assert list((tmp_path / "runs" / "fit" / "checkpoints").iterdir())
    assert not _processes_of(tmp_path)


def _processes_of(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_after_c_a_task_is_named_and_a_class_has_no_source(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(textwrap.dedent(TASK), encoding="utf-8")
    code = f'import stormo; print(stormo.train("fit.py", epochs=1, {SETTINGS.replace("num_gpus=2", "num_gpus=1")}))'
    out, err = _start(tmp_path, "-c", code).communicate(timeout=ENDS_WITHIN_S)
    assert out.splitlines()[-1] == "<stormo run fit: done>", err
    code = "import stormo\nclass Own(stormo.Task): pass\nstormo.train(Own)"
    _, err = _start(tmp_path, "-c", code).communicate(timeout=ENDS_WITHIN_S)
    assert "SettingError: Own was given, but this Python keeps no source" in err


def test_what_a_run_cannot_take_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for settings in ({"dry_run": True}, {"resume": "fit"}, {"num_nodes": 2}):
        with pytest.raises(SettingError, match="of one new run"):
            stormo.train("fashion-mnist", **settings)
    with pytest.raises(SettingError, match="a object was given"):
        stormo.run(_start, object())
    with pytest.raises(SettingError, match="it is no stormo"):
        stormo.train(dict)
    with pytest.raises(SettingError, match="option label was set to None"):
        stormo.train(Labelled(label=None))
    assert list((tmp_path / "runs").iterdir()) == []
    with pytest.raises(SettingError, match="there is no run"):
        stormo.open_run("fit")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"run_name": "a/b"}, "--run-name 'a/b' was set, but it names a folder in --runs-folder"),
        ({"run_name": "../x"}, "--run-name '../x' was set, but it names a folder in --runs-folder"),
        ({"run_name": 7.5}, "run_name was set to 7.5, but it takes text"),
        ({"runs_folder": 7}, "runs_folder was set to 7, but it takes text"),
        ({"config": 3}, "config was set to 3, but it takes text"),
        ({"num_gpus": True}, "num_gpus was set to True, but it takes a whole number"),
        ({"energy": "no"}, "energy was set to 'no', but it takes true or false"),
    ],
)
def test_settings_of_wrong_types_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=re.escape(text)):
        stormo.train(Labelled, **settings)
    assert list(tmp_path.iterdir()) == []


def test_the_name_in_a_file_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"config": Path("own.toml")}
    Path("own.toml").write_text('[run]\nrun_name = "a/b"\n')
    with pytest.raises(SettingError, match="--run-name 'a/b' was set"):
        stormo.train(Labelled, **settings)
    Path("own.toml").write_text("run = 3\n")
    with pytest.raises(SettingError, match="it is a section"):
        stormo.train("fashion-mnist", config="own.toml")


class _Callable:
    def __call__(self) -> None: ...


@pytest.mark.parametrize("thing", [7, functools.partial(_start, Path()), _Callable()])
def test_what_is_no_function_is_refused(thing: Any) -> None:
    with pytest.raises(SettingError, match=r"was given to stormo\.run\(\), but workers find a function by its name"):
        stormo.run(thing, object())


def test_true_is_no_number_of_workers() -> None:
    with pytest.raises(SettingError, match="num_gpus was set to True, but it takes a whole number"):
        stormo.run(_start, num_gpus=True)


def test_options_of_a_task_have_known_names() -> None:
    assert Labelled(Labelled.Options(label="b")).options.label == "b"
    with pytest.raises(SettingError, match=re.escape("Labelled(16) was made, but the options of a task have names")):
        Labelled(16)
    with pytest.raises(SettingError, match=r"Labelled\(labl=…\) was made.*did you mean label\?"):
        Labelled(labl="b")
    with pytest.raises(SettingError, match="no such option; declare it in its Options"):
        stormo.Task(width=3)


def test_no_task_is_refused() -> None:
    with pytest.raises(SettingError, match=r"stormo\.train\(\) was given no task"):
        stormo.train(None)


def test_a_run_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    run = stormo.open_run(MadeRun(name="made", epochs=1).write(tmp_path))
    for name, text in (("/nope/p.html", "it cannot be written (No such file"), (".", "it is a folder")):
        with pytest.raises(SettingError, match=re.escape(f"the page was to be {name}, but {text}")):
            run.report(name)
    (run.folder / "config.toml").unlink()
    with pytest.raises(SettingError, match=r"config\.toml is of the run made, but it cannot be read"):
        run.resume()
    (run.folder / "config.toml").write_text("task = [")
    with pytest.raises(SettingError, match="it is not valid TOML"):
        run.resume()
    (run.folder / "events.jsonl").write_text("")
    with pytest.raises(SettingError, match="a plot of run made was asked for, but no epoch of it has ended"):
        run.plot()
