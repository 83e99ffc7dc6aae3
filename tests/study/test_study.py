"""What a study makes of its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormo.config import toml
from stormo.config.layout import resolve_layout
from stormo.config.plan import check_settings
from stormo.config.schema import ResolvedBatch
from stormo.errors import SettingError, StormoError
from stormo.study.runner import check_runs
from stormo.study.study import Run, Study, read_arguments, read_study
from stormo.training.settings import read_settings


def study(*arguments: str) -> Study:
    return read_study(*read_arguments(["fashion-mnist", "--device", "cpu", *arguments]))


def value(arguments: list[str], flag: str) -> str | None:
    """The last value of a flag, which is the one that counts."""
    at = [index for index, argument in enumerate(arguments) if argument == flag]
    return arguments[at[-1] + 1] if at else None


def test_strong_keeps_the_global_batch_and_weak_that_of_a_worker() -> None:
    found = study("--workers", "4,2", "--mode", "both", "--batch_size=16", "--accumulate", "2", "--seed", "7")
    assert (found.workers, found.modes) == ((2, 4), ("strong", "weak"))
    strong, weak = (found.arguments(Run(mode=mode, workers=4, repeat=3)) for mode in ("strong", "weak"))
    assert (value(strong, "--global-batch-size"), value(strong, "--batch-size")) == ("64", None)  # 16 × 2 × 2 workers
    assert (value(weak, "--global-batch-size"), value(weak, "--batch-size")) == (None, "16")
    assert value(strong, "--num-gpus") == "4"
    assert value(strong, "--seed") == "9"  # another one in every repeat
    assert "--num-nodes" not in strong


def test_a_global_batch_is_cut_for_weak_scaling() -> None:
    found = study("--workers", "2,4", "--global-batch-size", "100")
    assert (found.global_batch_size, found.batch_size) == (100, 50)


def test_runs_are_short_unless_set() -> None:
    short = study("--workers", "1,2")
    arguments = list(short.train_arguments)
    assert (value(arguments, "--epochs"), value(arguments, "--target-accuracy"), short.seconds) == ("3", "2", 60.0)
    assert value(arguments, "--checkpoint-every") == "0"
    long = study("--workers", "1,2", "--target-accuracy", "0.8", "--epochs", "5", "--checkpoint-every", "1ep")
    arguments = list(long.train_arguments)
    assert (value(arguments, "--epochs"), value(arguments, "--target-accuracy"), long.seconds) == ("5", "0.8", None)
    assert value(arguments, "--checkpoint-every") == "1ep"
    assert long.keeps_checkpoints
    assert study("--workers", "1,2", "--target-accuracy", "0.8", "--seconds", "60").seconds == 60.0


def test_workers_on_several_nodes() -> None:
    found = study(*("--workers", "2,8", "--num-nodes", "1,2", "--node-id", "1", "--master-addr", "h", "--output", "o"))
    arguments = found.arguments(Run(mode="strong", workers=8, num_nodes=2))
    assert [value(arguments, flag) for flag in ("--num-gpus", "--num-nodes", "--node-id")] == ["4", "2", "1"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no --workers was set"),
        (["--workers", "4"], "different numbers"),
        (["--workers", "2,2"], "different numbers"),
        (["--workers", "1,x"], "--workers was set to 'x'"),
        (["--workers", "1,2", "--repeats", "0"], "--repeats 0 was set, but it must be at least 1"),
        (["--workers", "1,2", "--repeats", "x"], "--repeats was set to 'x'"),
        (["--workers", "1,2", "--mode", "odd"], "choose one of: both, strong, weak"),
        (["--workers", "1,2", "--seconds", "no"], "--seconds was set to 'no'"),
        (["--workers", "1,2", "--seconds", "0"], "--seconds 0 was set, but it takes a number above 0"),
        (["--workers", "1,2", "--epochs", "1"], "--epochs 1 was set"),
        (["--workers", "1,2", "--num-gpus", "2"], "leave it out: --workers 1,2 says how many"),
        (["--num-gpus", "2"], "leave it out, and set --workers"),
        (["--workers", "1,2", "--run-name", "x"], "--run-name was set"),
        (["--workers", "1,2", "--resume", "x"], "set --output FOLDER"),
        (["--workers", "1,2", "--resume", "--output", "o"], "leave it out: --output o is enough"),
        (["--workers", "1,2", "--grow-batch", "1:2x"], "epochs must be alike"),
        (["--workers", "1,2", "--batch-size", "auto"], "--batch-size auto was set"),
        (["--workers", "1,2", "--batch-size", "4", "--global-batch-size", "4"], "were both set"),
        (["--workers", "2,4", "--global-batch-size", "33"], "set a multiple of 2"),
        (["--workers", "1,2,4", "--num-nodes", "1,2"], "2 is not 3"),
        (["--workers", "2,5", "--num-nodes", "2", "--output", "o"], "set 6, or fewer --num-nodes"),
        (["--workers", "2,4", "--num-nodes", "2"], "without --output"),
        (["--workers", "1,2", "--node-id", "1"], "counted from 0 to 0"),
        (["--workers", "1,2", "--bach-size", "4"], "--batch-size"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(arguments: list[str], text: str) -> None:
    with pytest.raises(StormoError) as raised:
        study(*arguments)
    assert text in str(raised.value)


@pytest.mark.parametrize("line", ["batch_size = 8", "global_batch_size = 8", 'batch_size = "auto"'])
def test_the_batch_of_a_file_is_refused_unless_a_flag_sets_it(tmp_path: Path, line: str) -> None:
    file = tmp_path / "settings.toml"
    key = line.partition(" ")[0]
    file.write_text(f"[batch]\n{line}\naccumulate = 2\n", encoding="utf-8")
    with pytest.raises(SettingError, match=f"set --{key.replace('_', '-')} instead"):
        study("--workers", "1,2", "--config", str(file))
    for flags in ("--batch-size 20", "--global-batch-size 40"):
        found = study("--workers", "1,2", f"--config={file}", *flags.split())
        assert (found.global_batch_size, found.batch_size) == (40, 20)  # the file says two passes
        check_runs(found)


def test_the_nodes_of_a_file_are_refused_unless_a_flag_sets_them(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[workers]\nnum_nodes = 2\n", encoding="utf-8")
    with pytest.raises(SettingError, match="set --num-nodes instead"):
        study("--workers", "1,2", "--config", str(file))
    found = study("--workers", "1,2", "--num-nodes", "1", "--config", str(file))
    assert read_settings(found.arguments(Run(mode="strong", workers=2)))[0].workers.num_nodes == 1


def test_the_file_of_a_run_gives_how_it_trains_and_not_where_or_how_long(tmp_path: Path) -> None:
    arguments = (
        "fashion-mnist --device cpu --task.width 2 --task.train-samples 500 --no-energy --clip-norm 1e-05 --seed 3 "
        "--num-gpus 4 --num-nodes 2 --node-id 1 --master-addr h --master-port 29511 --epochs 7 --target-loss 0.5 "
        "--batch-size 20 --grow-batch 2:2x --max-batch-size 20 --compress powersgd --compress-rank 8"
    )
    config = read_settings(arguments.split())[0]
    file = tmp_path / "config.toml"
    effective = ResolvedBatch(global_batch_size=160, learning_rate=0.08, warmup_start=0.01)
    file.write_text(toml.to_toml(config, effective), encoding="utf-8")
    found = read_study(*read_arguments(["--workers", "1,2", "--config", str(file), "--compress", "bf16"]))
    check_runs(found)
    assert (found.global_batch_size, found.batch_size, found.seed, found.node_id) == (20, 20, 3, 0)
    run = read_settings(found.arguments(Run(mode="strong", workers=2)))[0]
    where = run.workers
    assert (where.num_gpus, where.num_nodes, where.master_addr, where.master_port) == (2, 1, "localhost", None)
    assert (run.stop.epochs, run.stop.target_accuracy, run.stop.target_loss) == (3, 2.0, None)
    assert (run.batch.grow_batch, run.run.checkpoint_every) == (None, "0")
    assert (run.task, run.task_options, run.energy) == (config.task, config.task_options, config.energy)
    assert (where.compress, where.compress_rank, run.optimizer) == ("bf16", 4, config.optimizer)
    aimed = study("--workers", "1,2", "--config", str(file), "--target-accuracy", "0.8")
    run = read_settings(aimed.arguments(Run(mode="strong", workers=2)))[0]
    assert (run.stop.epochs, run.stop.target_accuracy) == (7, 0.8)


@pytest.mark.parametrize(
    "flags",
    [
        "--strategy server --servers=2 --staleness 1",
        "--strategy=pipeline --schedule gpipe --micro_batches 4",
        "--mesh tensor=2",
        "--mesh shard=2 --zero 1 --offload",
        "--mesh shard=2 --shard-modules Linear",
        "--mesh shard=2 --checkpoint-activations --shard-modules Linear",
        *(f"--strategy {name}" for name in ("naive", "tensor", "hybrid", "hsdp")),
    ],
)
def test_one_worker_uses_the_strategy_single_where_it_cannot_have_the_one_set(flags: str) -> None:
    found = study("--workers", "1,2", *flags.split())
    alone, both = (found.arguments(Run(mode="strong", workers=count)) for count in (1, 2))
    assert set(flags.replace("_batches", "-batches").split()) <= set(both)
    config = read_settings(alone)[0]
    layout = resolve_layout(config, ())
    check_settings(config, layout)
    assert layout.strategy == "single"
    flag, asked = flags.replace("=", " ", 1).split()[:2]
    asked = asked if flag == "--strategy" else flags.split()[1]
    assert found.single_worker_note == f"strategy single, as one worker cannot have {flag} {asked}"


def test_one_worker_keeps_a_strategy_that_it_can_have(tmp_path: Path) -> None:
    for flags in ("--strategy fsdp", "--strategy local --average-every 4", "--strategy zero1", "--mesh replicate=1"):
        found = study("--workers", "1,2", *flags.split())
        assert found.single_worker_note == ""
        assert set(flags.split()) <= set(found.arguments(Run(mode="strong", workers=1)))
    file = tmp_path / "run.toml"
    file.write_text('[workers]\nmesh = "shard=2"\nzero = 1\n[sharding]\noffload = true\n', encoding="utf-8")
    found = study("--workers", "1,2", "--config", str(file))  # a file's, which the flag of the one worker takes back
    check_runs(found)
    assert found.single_worker_note == "strategy single, as one worker cannot have --mesh shard=2"
    assert "mesh" not in read_settings(found.arguments(Run(mode="strong", workers=1)))[0].given


def test_a_launcher_has_started_its_workers_already(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, text)
    for name, text in {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(SettingError, match="was started by torchrun"):
        study("--workers", "1,2")


def test_a_secret_is_not_written_to_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from stormo.config import option\n"
        "from tests.system.task import Options, Tiny\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Secretive(Options):\n"
        '    hub_token: str = option("", "of the hub")\n\n'
        "class Mine(Tiny):\n"
        "    Options = Secretive\n"
    )
    arguments = ["mine.py", "--device", "cpu", "--workers", "1,2"]
    with pytest.raises(SettingError, match=r"--task\.hub-token was set for a scaling study, .* study\.json would hold"):
        read_study(*read_arguments([*arguments, "--task.hub-token", "hf_mine"]))
    assert read_study(*read_arguments(arguments)).workers == (1, 2)
