"""The verb itself: what it prints, what it refuses, and that it answers without torch where it can."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stormo.cli import main
from stormo.config.options import without_flags
from stormo.config.schema import TrainConfig
from stormo.predict.advice import Advice
from stormo.predict.candidates import Candidate
from stormo.predict.command import report
from stormo.predict.forecast import GIB, Forecast, ModelSize, ParameterSize
from stormo.system.hardware import KNOWN_GPUS
from tests.golden import check_golden

TASK = '''
import torch
from torch import nn
import stormo

print("its file, too")


class Towers(stormo.Task):
    """A chain of wide layers."""

    def model(self):
        layers = [nn.Sequential(nn.Linear(8192, 8192), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(nn.Linear(32, 8192), *layers, nn.Linear(8192, 10))

    def train_data(self):
        return stormo.data.TensorData(torch.zeros(65536, 32), torch.zeros(65536, dtype=torch.int64))

    def validation_data(self):
        return stormo.data.TensorData(torch.zeros(64, 32), torch.zeros(64, dtype=torch.int64))

    def loss(self, model, batch):
        print("a task may print")
        return nn.functional.cross_entropy(model(batch[0]), batch[1]){end}
'''
Row = tuple[Candidate, Forecast | None]
GOLDEN = Path(__file__).parent / "golden" / "predict.txt"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "towers.py").write_text(TASK.format(end=""))
    return tmp_path


def predict(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["predict", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["predict", *arguments]) == 2
    captured = capsys.readouterr()
    error = captured.err.replace("its file, too\n", "")
    assert (captured.out, error.count("\n")) == ("", 1)
    return error.removeprefix("stormo: ")


@pytest.mark.usefixtures("folder")
def test_the_whole_of_a_small_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_golden(GOLDEN, predict(capsys, "towers.py", "--gpu", "a30", "--num-gpus", "2", "--batch-size", "256"))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 700 * 1024  # torch's own modules, of 1 GiB of weights nothing


@pytest.mark.usefixtures("folder")
def test_figures_have_their_units_and_the_advised_command_is_one_that_trains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["towers.py", "--batch-size=32768", "--gpu-memory", "6", "--json"]
    found = json.loads(predict(capsys, *arguments, "--offload", "--strategy", "fsdp"))
    (asked,) = [candidate for candidate in found["ways"] if candidate["is_as_set"]]
    assert (asked["flags"], asked["weights_bytes"]) == (["--strategy", "fsdp", "--offload"], 0)
    assert found["weights_bytes"] == 4 * found["trained_parameters"]
    plain = found["ways"][0]
    assert plain["total_bytes"] == sum(plain[f"{name}_bytes"] for name in TERMS)
    assert found["advice"]["text"] == "it fits as set."
    found = json.loads(predict(capsys, *arguments, "--strategy", "single", "--no-offload"))
    command = found["advice"]["command"].split()
    assert command[:3] == ["stormo", "train", "towers.py"]
    assert "--offload" not in command
    assert "--accumulate" in command
    assert main([*command[1:], "--dry-run", "--device", "cpu"]) == 0
    assert "32768 = " in capsys.readouterr().out  # the step is what it was


def test_what_was_set_is_one_row_under_any_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def advised(mesh: str, *arguments: str) -> str:
        (folder / "some.toml").write_text(f"[workers]\nnum_gpus = 2\nmesh = {mesh!r}\n[sharding]\noffload = true\n")
        command = ["towers.py", "--config", "some.toml", "--batch-size", "4", "--json", *arguments]
        found = json.loads(predict(capsys, *command))
        assert [candidate["is_as_set"] for candidate in found["ways"]].count(True) == 1
        assert len({json.dumps(candidate) for candidate in found["ways"]}) == 8 + 2  # none is there twice
        return f"{found['advice']['text']} {found['advice']['command']}"

    trained = "stormo train towers.py --config some.toml --batch-size 4"
    assert advised("shard=2", "--gpu", "t4") == f"it fits as set. {trained}"
    assert advised("replicate=2", "--gpu-memory", "5.2", "--no-graph", "--no-offload") == (
        "the strategy set does not fit; the optimizer's state and the gradients must be sharded to fit, and zero2 "
        f"sends no more than ddp. {trained} --no-graph --strategy zero2 --no-offload"
    )
    assert (
        main(["train", *trained.split()[2:], "--device", "cpu", "--strategy", "zero2", "--no-offload", "--dry-run"])
        == 0
    )
    assert "zero2: " in capsys.readouterr().out  # whatever mesh the file names
    (folder / "towers.py").write_text(TASK.format(end="").replace("*layers, ", ""))  # now there are two pieces
    found = json.loads(predict(capsys, "towers.py", "--gpu", "t4", "--num-gpus=4", "--strategy=pipeline", "--json"))
    assert found["advice"]["text"] == "the strategy set is not possible; every GPU can hold a copy."


@pytest.mark.usefixtures("folder")
def test_server_and_local_are_rows_and_their_options_are_left_out_of_other_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["towers.py", "--num-gpus", "2", "--batch-size", "256", "--json"]

    def found(*flags: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        seen = json.loads(predict(capsys, *arguments, *flags))
        (asked,) = [candidate for candidate in seen["ways"] if candidate["is_as_set"]]
        assert seen["ways"][1]["flags"][:2] == ["--strategy", "ddp"]  # with --no-graph where a graph does not fit
        assert seen["ways"][1]["is_possible"]
        return asked, seen["ways"][1], seen["advice"]["command"].split()

    served, copied, command = found("--gpu", "a30", "--strategy", "server", "--servers", "2")
    assert (served["state_bytes"], served["host_bytes_per_node"] > 6 * served["weights_bytes"]) == (0, True)
    assert command[-4:] == ["--strategy", "server", "--servers", "2"]
    *_, command = found("--gpu-memory", "2.6", "--strategy", "server", "--servers=2", "--staleness", "3")
    assert " ".join(command) == "stormo train towers.py --num-gpus 2 --batch-size 256 --strategy fsdp --offload"
    local, _, command = found("--gpu", "a30", "--strategy", "local", "--outer-lr", "0.7", "--outer-momentum", "0.9")
    assert local["state_bytes"] == copied["state_bytes"] + 2 * local["weights_bytes"]
    assert local["activations_bytes"] < copied["activations_bytes"]  # no gradients that stay
    assert command[-6:] == ["--strategy", "local", "--outer-lr", "0.7", "--outer-momentum", "0.9"]


def test_error_feedback_counts_and_other_strategies_are_not_compressed(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    arguments = ["towers.py", "--num-gpus", "2", "--batch-size", "256", "--json"]
    powersgd = ["--compress", "powersgd", "--compress-rank", "2"]
    seen = json.loads(predict(capsys, *arguments, "--gpu", "a30", *powersgd))
    (asked,) = [candidate for candidate in seen["ways"] if candidate["is_as_set"]]
    assert asked["state_bytes"] == seen["optimizer_state_bytes"] + seen["weights_bytes"]
    assert all(candidate["is_possible"] for candidate in seen["ways"] if "zero2" in candidate["flags"])
    assert seen["advice"]["command"].endswith("--compress powersgd --compress-rank 2")
    settings = folder / "settings.toml"
    settings.write_text('[workers]\ncompress = "powersgd"\n')
    for flags, kept in ((powersgd, []), (["--config", str(settings)], ["--compress", "none"])):
        command = json.loads(predict(capsys, *arguments, "--gpu-memory", "2.6", *flags))["advice"]["command"].split()
        assert [word for word in command if word in ("--compress", "--compress-rank", "none", "powersgd")] == kept
        assert "--offload" in command


TERMS = (
    *("weights", "gradients", "state", "activations", "gathered", "buffers", "data", "workspace"),
    *("context", "captured"),
)


def test_a_loss_that_reads_values_leaves_the_rest_of_the_forecast(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "reading.py").write_text(TASK.format(end=" * float(batch[0].sum() > -1)"))
    output = predict(capsys, "reading.py", "--gpu", "a30")
    assert "Activations are unknown and left out: the loss cannot be computed on" in output
    assert "no strategy is advised" in output.lower()
    assert "268,820,490 trained" in output


def test_what_cannot_be_forecast_is_refused_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormo.predict.command.visible_gpus", list)
    assert refused(capsys, "towers.py").startswith("no --gpu was set, but this machine has no GPU")
    assert "did you mean h100-80gb?" in refused(capsys, "towers.py", "--gpu", "h100-80g")
    assert "set h100-80gb or h100-64gb or h100-pcie or" in refused(capsys, "towers.py", "--gpu", "H100")
    assert refused(capsys, "towers.py", "--gpu-memory", "0").startswith("--gpu-memory 0 was set, but it is the GiB of")
    assert refused(capsys, "towers.py", "--device", "cpu").startswith("--device cpu was set, but")
    given = ("towers.py", "--gpu", "t4", "--num-gpus", "2")
    assert refused(capsys, *given, "--strategy", "dp").startswith("--strategy dp was set, but")
    assert refused(capsys, *given, "--strategy", "hybrid").startswith(
        "--strategy hybrid was set, but the features that"
    )
    assert refused(capsys, *given, "--strategy", "hsdp").startswith("--strategy hsdp was set, but it shards within a")
    assert refused(capsys, *given, "--zero", "2").startswith("--zero 2 was set without --mesh, but")  # as training does
    (folder / "gone.py").write_text(TASK.format(end="").replace("torch.zeros(65536, 32)", "torch.load('gone.pt')"))
    assert "its data cannot be read here (FileNotFoundError" in refused(capsys, "gone.py", "--gpu", "t4")


def test_nothing_is_fetched_for_a_forecast(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STORMO_DATA", str(tmp_path))
    monkeypatch.setattr("stormo.data.fashion_mnist._flaws_in", lambda *_: ["there is nothing"])
    monkeypatch.setattr("stormo.data.fashion_mnist._fetch", None)  # which cannot be called
    output = predict(capsys, "fashion-mnist", "--task.width", "1", "--gpu", "t4")
    assert "the data are not here; set --task.data-folder" in output
    assert list(tmp_path.iterdir()) == []


def test_help_answers_without_torch() -> None:
    program = (
        "import sys\nfrom stormo.cli import main\ntry:\n    main(['predict', '--help'])\n"
        "except SystemExit:\n    sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.startswith("usage: stormo predict")) == (0, True)


def test_known_devices_are_named_as_users_type_them() -> None:
    assert all(key == key.lower() and 8 <= gpu.memory_gb <= 200 for key, gpu in KNOWN_GPUS.items())
    assert KNOWN_GPUS["h100-80gb"].described().memory_bytes == 80 * 10**9


def test_flags_are_taken_out_with_their_values() -> None:
    arguments = ["t.py", "--strategy", "ddp", "--zero=2", "--no-offload", "--batch_size", "4", "--epochs", "1"]
    flags = {"--strategy": 1, "--zero": 1, "--offload": 0, "--batch-size": 1}
    assert without_flags(arguments, flags) == ["t.py", "--epochs", "1"]


def test_the_text_of_impossible_and_unknown_candidates() -> None:
    weights = ParameterSize(
        name="w", num_bytes=4 * GIB, num_values=GIB, num_rows=8, is_trained=True, state_bytes=8 * GIB
    )
    frozen = ParameterSize(name="e", num_bytes=GIB, num_values=GIB // 2, num_rows=8, is_trained=False, dtype="bfloat16")
    model = ModelSize(parameters=(weights, frozen), buffer_bytes=0, step_bytes=0, optimizer="AdamW")
    terms = dict.fromkeys(TERMS, 0.0) | {"weights": 5.0 * GIB, "gradients": 4.0 * GIB, "context": 1.25 * GIB}

    def row(flags: str, batch: int, largest: int | None, *, host: float = 0.0, reason: str = "") -> Row:
        candidate = Candidate(
            key=flags, flags=tuple(flags.split()), config=TrainConfig(), reason=reason, is_as_set="ddp" in flags
        )
        more = {"activations": batch * GIB / 2, "state": 8.0 * GIB - host}
        one = Forecast(terms=terms | more, host_bytes=host, batch=batch, limit_bytes=20.0 * GIB, largest_batch=largest)
        return candidate, None if reason else one

    found = [
        row("--strategy ddp", 8, 3),
        row("--strategy fsdp --offload", 8, 24, host=8.0 * GIB),
        row("--strategy fsdp", 4, 0),
        row("--strategy tensor", 8, 0, reason="layer.3 has 5 parts, which 2 do not divide; set fewer"),
    ]
    notices = ["torch.compile is not counted; it mostly needs less memory"]
    advice = Advice(key="ddp", accumulate=4, text="it fits as set in 4 micro-batches of 2 samples.")
    shown = report(
        model, found, title="made-up.py on 2 × GPU with 22 GiB (memory as set), bf16", memory_bytes=22 * GIB,
        kept_per_sample=3.5 * 2**20, notices=notices, advice=advice, command="stormo train made-up.py --accumulate 4",
    )  # fmt: skip
    unknown = [(candidate, replace(one, largest_batch=None)) for candidate, one in found[:3] if one is not None]
    notices = ["Activations are unknown and left out: the data are not here"]
    advice = Advice(key=None, accumulate=1, text="no strategy is advised, as activations are unknown.")
    shown += ["", "==== without activations ===="]
    shown += report(
        model, unknown, title="made-up.py on 2 × GPU with 22 GiB (memory as set), bf16", memory_bytes=22 * GIB,
        kept_per_sample=None, notices=notices, advice=advice, command="",
    )  # fmt: skip
    check_golden(GOLDEN.with_name("made_up.txt"), "\n".join(shown) + "\n")
