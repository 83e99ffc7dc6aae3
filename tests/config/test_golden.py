"""Every sentence of the plan and every refusal of the settings, in two files that a reviewer can read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stormo.config.layout import Launched
from stormo.config.plan import Facts, Plan, with_layers, with_task_optimizer
from stormo.errors import SettingError
from stormo.system.hardware import Gpu
from tests.config.test_options import from_toml, parse
from tests.config.test_plan import FACTS, H200, RTX4090, STREAM, T4, V100, configured, plan_of
from tests.golden import check_golden

GOLDEN = Path(__file__).parent / "golden"
SLURM = Launched(launcher="slurm", world_size=4, local_size=4, num_nodes=1, gpus_on_node=1)
AUTO = {"batch_size": "auto"}
LOCAL = {"strategy": "local", "num_gpus": 2}
SERVER = {"strategy": "server", "num_gpus": 4}
STALE = {**SERVER, "staleness": 2}
PIPELINE = {"strategy": "pipeline", "num_gpus": 2}
ZERO_BUBBLE = {**PIPELINE, "schedule": "zero-bubble"}

REFUSED: list[dict[str, Any]] = [
    {"num_gpus": 0},
    {"num_nodes": 0},
    {"node_id": 2},
    {"node_id": -1, "num_nodes": 2},
    {"master_port": 80},
    {"master_port": 49152},
    {"timeout": 0.0},
    {"timeout": 0.001},
    {"timeout": 2_592_001.0},
    {"device": "cuda"},
    {"backend": "nccl"},
    {"strategy": "dp"},
    {"strategy": "dp", "gpus": [H200] * 4, "num_nodes": 2},
    {"strategy": "dp", "gpus": [H200] * 4, "sync_batch_norm": True},
    {"strategy": "single", "num_gpus": 2},
    {"gpus": [H200], "num_gpus": 2},
    {"gpus": [H200], "launched": SLURM},
    # batch
    {"batch_size": 0},
    {"accumulate": 0},
    {"ghost_batch_size": 1},
    {"ghost_batch_size": 8, "sync_batch_norm": True},
    {**AUTO, "accumulate": 2},
    {"global_batch_size": 100, "batch_size": 32, "num_gpus": 2},
    {"global_batch_size": 5, "num_gpus": 3, "accumulate": 2},
    {"global_batch_size": 0},
    {"max_batch_size": 64},
    {"max_batch_size": 64, "grow_batch": "2:2x", **AUTO},
    {"max_batch_size": 8, "grow_batch": "2:2x"},
    *({"grow_batch": text} for text in ("", "30", "30:2", "30:2x,", "30:1x", "0:2x", "30:2x,20:2x", "-1:2x", "١:2x")),
    {"facts": replace(FACTS, num_train=3), "num_gpus": 4},
    {"facts": replace(FACTS, num_validation=0)},
    {"facts": replace(FACTS, train_bytes=None), "loader": "resident"},
    {"facts": STREAM},
    {"facts": STREAM, "epoch_samples": 0},
    {"facts": STREAM, "epoch_samples": 5, "loader_workers": 2},
    {"epoch_samples": 5},
    # optimizer
    {"base_lr": 0.0},
    {"gradient_noise": 1e7},
    {"weight_decay": -0.1},
    {"warmup_from": 2.0},
    {"momentum": 1.0},
    {"beta2": 1.0, "optimizer": "lamb"},
    {"beta2": 0.9},
    {"trust_coefficient": 0.01, "optimizer": "lamb"},
    {"grad_averaging": True, "optimizer": "adamw"},
    {"nesterov": True, "momentum": 0.0},
    {"nesterov": True, "optimizer": "adamw"},
    {"base_batch_size": 32, "lr_rule": "none"},
    {"gradient_noise_batch": 32},
    {"gradient_noise_decay": 0.6},
    {"noise_scale": True},
    # speed
    {"precision": "tf32"},
    {"loader_workers": -1},
    {"loader_workers": 1025},
    {"graph": True},
    {"graph": True, "gpus": [H200] * 2, "strategy": "zero1"},
    {"graph": True, "gpus": [H200] * 2, "strategy": "fsdp", "offload": True},
    {"graph": True, "gpus": [H200] * 2, "compress": "bf16"},
    {"graph": True, "gpus": [H200] * 2, "backend": "gloo"},
    {"graph": True, "gpus": [H200], "accumulate": 2},
    {"graph": True, "gpus": [H200], "grow_batch": "2:2x"},
    {"graph": True, "gpus": [H200], "compile": True},
    {"graph": True, "gpus": [H200], "checkpoint_activations": True},
    {"graph": True, "gpus": [H200], "batch_size": 70_000},
    {"graph": True, "gpus": [H200], "gradient_noise_batch": 4},
    # stop and run
    {"target_accuracy": 85.0},
    {"target_accuracy": -1.0},
    {"rollback_factor": 0.1},
    {"rollback_factor": 1.0, "on_divergence": "rollback"},
    {"accumulate": 10**9},
    {"gradient_noise": 1.0, "gradient_noise_decay": 1e300},
    *({"run_name": name} for name in ("", "..", "a/b", "-x", "a\nb", "a\x1b[2J")),
    *({"checkpoint_every": text} for text in ("often", "-1", "-1ep", "1.5", "nan", "infep", "ep", "", "1 epoch")),
    {"checkpoint_every": "1e308ep"},
    *({"profile": text} for text in ("", "ten", ":5", "²", "0", "0:5", "20:10", "1:1002", "80000:80001")),
    # strategies
    {"strategy": "fsdp", "mesh": "shard=2", "num_gpus": 2},
    {"zero": 2},
    {"mesh": "tensor=2", "zero": 2, "num_gpus": 2},
    {"mesh": "shard=2", "zero": 4, "num_gpus": 2},
    {"strategy": "hsdp", "num_gpus": 4},
    {"strategy": "pipeline"},
    {"strategy": "ddp", "offload": True},
    {"strategy": "zero1", "num_gpus": 2, "shard_modules": "blocks.*"},
    {"strategy": "fsdp", "num_gpus": 2, **AUTO},
    {"strategy": "fsdp", "num_gpus": 2, "channels_last": True},
    {"strategy": "fsdp", "num_gpus": 2, "noise_scale": True},
    {"strategy": "fsdp", "num_gpus": 2, "schedule": "gpipe"},
    {"micro_batches": 2},
    {"mesh": "pipeline=1,shard=2", "num_gpus": 2, "schedule": "gpipe"},
    {"strategy": "naive", "num_gpus": 2, "micro_batches": 2},
    {**PIPELINE, "gradient_noise_batch": 4},
    {**PIPELINE, "micro_batches": 5},
    {**PIPELINE, "schedule": "interleaved", "micro_batches": 1},
    {**PIPELINE, "schedule": "interleaved", "batch_size": 7},
    {**ZERO_BUBBLE, "compile": True},
    {**ZERO_BUBBLE, "checkpoint_activations": True},
    {"mesh": "pipeline=2,shard=2", "num_gpus": 4, "schedule": "zero-bubble"},
    {**LOCAL, "average_every": "40000"},
    {**LOCAL, "average_every": "0"},
    {**LOCAL, "outer_lr": 0.0},
    {**LOCAL, "outer_momentum": 1.0},
    {**LOCAL, "sync_batch_norm": True},
    {**LOCAL, "noise_scale": True},
    {"average_every": "8", "num_gpus": 2},
    {"strategy": "server"},
    {**SERVER, "servers": 5},
    {**SERVER, "servers": 0},
    {**SERVER, "staleness": -1},
    {**SERVER, "staleness": 1001},
    {"servers": 2},
    {**SERVER, "precision": "fp16"},
    {**SERVER, "noise_scale": True},
    {**STALE, "deterministic": True},
    {**STALE, "sync_batch_norm": True},
    {**STALE, "clip_norm": 1.0},
    {**STALE, "gradient_noise": 0.1},
    {"compress": "bf16", "strategy": "fsdp"},
    {"compress": "fp16", **LOCAL},
    {"compress_rank": 2},
    {"compress": "powersgd", "compress_rank": 0},
    {"compress": "powersgd", "precision": "fp16", "num_gpus": 2},
    {"compress": "powersgd", "noise_scale": True, "num_gpus": 2},
]

FLAGS = (
    *("--epochs three", "--epochs 3.0", "--base-lr nan", "--base-lr inf", "--clip-norm x", "--decay cosin"),
    *("--batch-size max", "--task.width a", "a.py b.py", "--global-batch 8", "--num-nodes 3:1"),
    *("--seed 9223372036854775808", "--batch-size 99999999999999999999"),
)
FILES = (
    "[run]\nresume = true",
    *("[bach]\nbatch_size = 1", "bach = 1", "batch_size = 1", "width = 1", "batch = 1", "[batch]\nbatch_sise = 1"),
    *("[task_options]\nwidht = 1", "[batch]\nbatch_size = 1.5", "[batch]\nbatch_size = true", "[stop]\nepochs = inf"),
    *(
        "[batch]\nbatch_size = [1]",
        "[optimizer]\nbase_lr = nan",
        "[optimizer]\nnesterov = 1",
        "[speed]\ncompile = 'on'",
    ),
    *("[optimizer]\ndecay = 'cosin'", "[optimizer]\ndecay = ['cosine']", "[run]\nrun_name = 3", "[run]\nresume = 'x'"),
    *("[task]\nwidth = 2", "task = 3"),
)

PLANS: list[dict[str, Any]] = [
    {},
    {"gpus": [H200], "epochs": 4000},
    {"gpus": [H200, T4], "num_nodes": 2, "batch_size": 512, "decay": "cosine", "compress": "bf16"},
    {"gpus": [V100] * 4, "strategy": "dp", "optimizer": "larc", "nesterov": True, "clip_norm": 0.5},
    {"gpus": [RTX4090], "facts": replace(FACTS, data="all there is", data_sha256="abc"), "batch_size": 70_000},
    {"num_gpus": 3, "global_batch_size": 64, "lr_rule": "sqrt", "decay": "step", "checkpoint_every": "0.25ep"},
    {"num_gpus": 2, "base_batch_size": 16, "lr_rule": "sqrt", "accumulate": 3, "checkpoint_every": "0"},
    {**AUTO, "num_gpus": 2, "grow_batch": "2:2x,99:2x", "decay": "linear", "epochs": 7},
    {"ghost_batch_size": 32, "global_batch_size": 402, "num_gpus": 2, "accumulate": 2},
    {"ghost_batch_size": 32, "optimizer": "novograd", "grad_averaging": True, "keep_checkpoints": 1},
    {"num_gpus": 2, "sync_batch_norm": True, "deterministic": True, "on_divergence": "rollback"},
    {"facts": STREAM, "epoch_samples": 1000, "target_accuracy": 0.9, "target_loss": 1.5, "patience": 1},
    {"facts": replace(STREAM, num_train=50, has_accuracy=False), "loader_workers": 0, "target_accuracy": 0.9},
    {
        "facts": replace(FACTS, train_bytes=9 * 2**30),
        "gradient_noise": 0.1,
        "gradient_noise_batch": 8,
        "clip_norm": 1.0,
    },
    {**LOCAL, "average_every": "0.5ep", "outer_lr": 0.7, "outer_momentum": 0.9},
    {**LOCAL, "num_gpus": 1},
    {**SERVER},
    {**STALE, "servers": 2},
    {**PIPELINE, "num_gpus": 4, "checkpoint_activations": True},
    {"mesh": "replicate=2,shard=2,tensor=2", "zero": 2, "num_gpus": 8, "offload": True},
    {"compress": "powersgd", "num_gpus": 4},
]


def _named(flags: dict[str, Any]) -> str:
    facts: Facts | None = flags.get("facts")
    gpus: Sequence[Gpu] = flags.get("gpus", ())
    texts = [f"--{key.replace('_', '-')} {value!r}" for key, value in flags.items() if key not in _NO_FLAGS]
    texts += [f"[{', '.join(gpu.name for gpu in gpus)}]"] * bool(gpus) + ["[srun]"] * ("launched" in flags)
    if facts is not None:
        texts.append(f"[{', '.join(f'{k}={getattr(facts, k)}' for k in _FACTS if getattr(facts, k) != _FACTS[k])}]")
    return " ".join(texts) or "no flags"


_NO_FLAGS = ("gpus", "facts", "launched")
_FACTS = {name: getattr(FACTS, name) for name in FACTS.__slots__}


def _refusal(title: str, refused: Callable[[], object]) -> str:
    with pytest.raises(SettingError) as raised:
        refused()
    return f"{title}\n    {raised.value}\n"


def test_refusals() -> None:
    lines = [_refusal(_named(flags), functools.partial(plan_of, **flags)) for flags in REFUSED]
    lines += [_refusal(flags, functools.partial(parse, *flags.split())) for flags in FLAGS]
    lines += [_refusal(text.replace("\n", " "), functools.partial(from_toml, text)) for text in FILES]
    check_golden(GOLDEN / "refusals.txt", "".join(lines))


def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("stormo.config.link.num_cores", lambda: 64)
    texts = [f"{_named(flags)}\n{_text(plan_of(**flags))}" for flags in PLANS]
    flags: dict[str, Any] = {"num_gpus": 2, "weight_decay": 0.1, "sync_batch_norm": True}
    config, plan = configured(**flags), plan_of(**flags)
    for title, other in (
        ("a task with an optimizer", with_task_optimizer(config, plan)),
        ("a task whose optimizer is made", with_task_optimizer(config, plan, "Adam")),
        ("no known layers", with_layers(config, plan, has_convolutions=None, has_batch_norms=None)),
        ("no such layers", with_layers(config, plan, has_convolutions=False, has_batch_norms=False)),
    ):
        texts.append(f"{title}: {_named(flags)}\n{_text(other)}")
    check_golden(GOLDEN / "plans.txt", "\n".join(texts))


def _text(plan: Plan) -> str:
    return "".join(f"    {line}\n" for line in plan.lines())
