"""The arithmetic of a run: layouts, batches, rates, and every setting that cannot hold."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormo.config import options
from stormo.config.layout import Launched, Layout, resolve_layout
from stormo.config.plan import Facts, Plan, choices, resolve, with_layers, with_own_optimizer, with_passes
from stormo.config.schema import Effective, TrainConfig
from stormo.data.order import part
from stormo.errors import SettingError
from stormo.system.hardware import Gpu

H200 = Gpu(name="NVIDIA H200", memory_bytes=141 * 2**30, capability=(9, 0))
V100 = Gpu(name="Tesla V100-SXM2-16GB", memory_bytes=16 * 2**30, capability=(7, 0))
T4 = Gpu(name="Tesla T4", memory_bytes=15 * 2**30, capability=(7, 5))
RTX4090 = Gpu(name="NVIDIA GeForce RTX 4090", memory_bytes=24 * 2**30, capability=(8, 9))
P100 = Gpu(name="Tesla P100-PCIE-16GB", memory_bytes=16 * 2**30, capability=(6, 0))
FACTS = Facts(
    num_train=60_000,
    num_validation=10_000,
    flops_per_sample=11.08e9,
    compile_saves=0.05,
    train_bytes=60_000 * 792,
)


def configured(**flags: Any) -> TrainConfig:
    return options.make_config(flags, None)


def layout_of(gpus: Sequence[Gpu] = (), launched: Launched | None = None, **flags: Any) -> Layout:
    return resolve_layout(configured(**flags), gpus, launched)


def plan_of(gpus: Sequence[Gpu] = (), facts: Facts = FACTS, launched: Launched | None = None, **flags: Any) -> Plan:
    return resolve(configured(**flags), layout_of(gpus, launched, **flags), facts)


def said(plan: Plan | Layout, label: str) -> str:
    return dict(plan.explanation)[label]


# --- every check ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"batch_size": "auto", "accumulate": 2},
            "--accumulate 2 was set with --batch-size auto, but auto finds the passes that make up the global batch; "
            "leave out --accumulate or set it to 1, or set --batch-size to a number.",
        ),
        ({"num_gpus": 0}, "--num-gpus 0 was set, but it must be at least 1; set --num-gpus 1 or more."),
        ({"num_nodes": 0}, "--num-nodes 0 was set, but it must be at least 1; set --num-nodes 1 or more."),
        (
            {"node_id": 2},
            "--node-id 2 was set with --num-nodes 1, but the nodes are counted from 0 to 0; "
            "set --num-nodes 3 or more, or leave --node-id out.",
        ),
        (
            {"node_id": -1, "num_nodes": 2},
            "--node-id -1 was set with --num-nodes 2, but the nodes are counted from 0 to 1; "
            "set --node-id to a number from 0 to 1.",
        ),
        ({"master_port": 80}, "--master-port 80 was set, but it lies outside 1024 to 49151; set a port in that range."),
        (
            {"master_port": 49152},
            "--master-port 49152 was set, but it lies outside 1024 to 49151; set a port in that range.",
        ),
        ({"timeout": 0.0}, "--timeout 0 was set, but it must be above 0 seconds; set --timeout 600."),
        (
            {"device": "cuda"},
            "--device cuda was set, but no GPU is visible to this process; set --device cpu, or check nvidia-smi.",
        ),
        (
            {"strategy": "dp"},
            "--strategy dp was set, but DataParallel splits a batch over GPUs and none is used; set --strategy ddp.",
        ),
        (
            {"backend": "nccl"},
            "--backend nccl was set, but NCCL moves GPU memory and the workers run on CPUs; set --backend gloo.",
        ),
        (
            {"strategy": "single", "num_gpus": 2},
            "--strategy single was set with 2 workers, but single trains on one device; "
            "set --strategy ddp, or --num-gpus 1 --num-nodes 1.",
        ),
        ({"batch_size": 0}, "--batch-size 0 was set, but it must be at least 1; set --batch-size 1 or more."),
        ({"accumulate": 0}, "--accumulate 0 was set, but it must be at least 1; set --accumulate 1 or more."),
        ({"epochs": 0}, "--epochs 0 was set, but it must be at least 1; set --epochs 1 or more."),
        ({"patience": 0}, "--patience 0 was set, but it must be at least 1; set --patience 1 or more."),
        (
            {"validation_batch_size": 0},
            "--validation-batch-size 0 was set, but it must be at least 1; set --validation-batch-size 1 or more.",
        ),
        (
            {"target_accuracy": -1.0},
            "--target-accuracy -1 was set, but it must be at least 0; set --target-accuracy 0 or more.",
        ),
        (
            {"loader_workers": 99999},
            "--loader-workers 99999 was set, but so many processes are started by each worker, and more than 1024 read "
            "no faster; set about as many as a worker has cores.",
        ),
        (
            {"loader_workers": -1},
            "--loader-workers -1 was set, but it must be at least 0; set --loader-workers 0 or more.",
        ),
        (
            {"keep_checkpoints": 0},
            "--keep-checkpoints 0 was set, but it must be at least 1; set --keep-checkpoints 1 or more.",
        ),
        ({"seed": -1}, "--seed -1 was set, but it must be at least 0; set --seed 0 or more."),
        ({"seed": 2**63}, f"--seed {2**63} was set, but it must fit in 63 bits; set a smaller seed."),
        (
            {"weight_decay": -0.1},
            "--weight-decay -0.1 was set, but it must be at least 0; set --weight-decay 0 or more.",
        ),
        (
            {"warmup_epochs": -1.0},
            "--warmup-epochs -1 was set, but it must be at least 0; set --warmup-epochs 0 or more.",
        ),
        ({"warmup_from": -1.0}, "--warmup-from -1 was set, but it must be at least 0; set --warmup-from 0 or more."),
        ({"base_lr": 0.0}, "--base-lr 0 was set, but it must be above 0; set --base-lr to a positive number."),
        ({"clip_norm": 0.0}, "--clip-norm 0 was set, but it must be above 0; set --clip-norm to a positive number."),
        (
            {"decay_every": 0.0},
            "--decay-every 0 was set, but it must be above 0; set --decay-every to a positive number.",
        ),
        ({"momentum": 1.0}, "--momentum 1 was set, but it must lie in [0, 1); set something like --momentum 0.9."),
        (
            {"beta2": 1.0, "optimizer": "lamb"},
            "--beta2 1 was set, but it must lie in [0, 1); set something like --beta2 0.99.",
        ),
        (
            {"eps": 0.0, "optimizer": "lamb"},
            "--eps 0 was set, but it must be above 0; set --eps to a positive number.",
        ),
        (
            {"trust_coefficient": -1.0, "optimizer": "lars"},
            "--trust-coefficient -1 was set, but it must be above 0; set --trust-coefficient to a positive number.",
        ),
        (
            {"beta2": 0.9},
            "--beta2 0.9 was set with --optimizer sgd, but it belongs to adamw, lamb or novograd; leave out --beta2, "
            "or set another --optimizer.",
        ),
        (
            {"trust_coefficient": 0.01, "optimizer": "lamb"},
            "--trust-coefficient 0.01 was set with --optimizer lamb, but it belongs to lars or larc; leave out "
            "--trust-coefficient, or set another --optimizer.",
        ),
        (
            {"grad_averaging": True, "optimizer": "adamw"},
            "--grad-averaging was set with --optimizer adamw, but it belongs to novograd; leave out --grad-averaging, "
            "or set another --optimizer.",
        ),
        *(
            (
                {"run_name": name},
                f"--run-name {name!r} was set, but it names a folder in --runs-folder; set a plain name of at most 200 "
                "bytes, without / and line ends and not with - in front.",
            )
            for name in ("", "..", "a/b", "-x", "a\nb", "a\x1b[2J")
        ),
        (
            {"nesterov": True, "momentum": 0.0},
            "--nesterov was set with --optimizer sgd --momentum 0, but Nesterov's momentum needs sgd, lars or larc and "
            "a momentum above 0; set --no-nesterov, or --momentum 0.9.",
        ),
        (
            {"nesterov": True, "optimizer": "adamw"},
            "--nesterov was set with --optimizer adamw --momentum 0.9, but Nesterov's momentum needs sgd, lars or larc "
            "and a momentum above 0; set --no-nesterov, or --optimizer sgd, lars or larc.",
        ),
        (
            {"global_batch_size": 100, "batch_size": 32, "num_gpus": 2},
            "--global-batch-size 100 and --batch-size 32 were both set, but 32 per worker × 2 workers × 1 accumulation "
            "makes 64; set only one of them.",
        ),
        (
            {"global_batch_size": 5, "num_gpus": 3, "accumulate": 2},
            "a global batch of 5 was set, but 3 workers × 2 accumulation cut it into 6 parts of at least one sample; "
            "set --global-batch-size 6 or more.",
        ),
        (
            {"global_batch_size": 0},
            "a global batch of 0 was set, but 1 worker × 1 accumulation cut it into 1 part of at least one sample; "
            "set --global-batch-size 1 or more.",
        ),
        (
            {"precision": "tf32"},
            "--precision tf32 was set, but TF32 exists only on GPUs and the workers run on CPUs; set fp32.",
        ),
        *(
            (
                {"checkpoint_every": text},
                f"--checkpoint-every {text} was set, but it is neither a number of steps (500) nor of epochs "
                "(1ep, 0.25ep); set one of these, or 0 for none.",
            )
            for text in ("often", "-1", "-1ep", "1.5", "nan", "inf", "infep", "ep", "", "1 epoch")
        ),
    ],
)
def test_what_cannot_hold_is_refused_with_the_whole_sentence(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        plan_of(**flags)
    assert str(caught.value) == sentence


def test_settings_of_an_optimizer_are_taken_where_they_belong_and_a_tasks_own_are_never_refused() -> None:
    for flags in (
        {"optimizer": "larc", "trust_coefficient": 0.02, "nesterov": True},
        {"optimizer": "novograd", "beta2": 0.5, "eps": 1e-3, "grad_averaging": True},
        {"optimizer": "sgd", "grad_averaging": False},
    ):
        plan_of(**flags)
    config = options.make_config({"optimizer": "sgd"}, None, {"optimizer": "adamw", "beta2": 0.95})
    resolve(config, layout_of(), FACTS)


def test_more_workers_than_samples_are_refused() -> None:
    with pytest.raises(SettingError) as caught:
        plan_of(facts=replace(FACTS, num_train=3), num_gpus=4)
    assert str(caught.value) == (
        "4 workers were asked for, but the training set has 3 samples, fewer than one for each; "
        "set --num-gpus for at most 3 workers."
    )


def test_a_data_set_without_tensors_cannot_be_resident() -> None:
    with pytest.raises(SettingError) as caught:
        plan_of(facts=replace(FACTS, train_bytes=None), loader="resident")
    assert str(caught.value) == (
        "--loader resident was set, but this task's data set is not held in tensors; "
        "set --loader streamed, or let train_data() return a stormo.data.TensorData."
    )


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_a_machine_without_gpus_gets_one_cpu_process() -> None:
    layout = layout_of()
    assert (layout.device_type, layout.gpu, layout.backend) == ("cpu", None, "gloo")
    assert (layout.strategy, layout.world_size, layout.workers_per_node, layout.num_nodes) == ("single", 1, 1, 1)
    assert said(layout, "workers") == (
        "1 = 1 node × 1 CPU process (the default; no GPU is visible); no communication needed"
    )
    assert said(layout, "strategy") == "single: one worker, nothing to average"


def test_num_gpus_without_gpus_counts_cpu_processes() -> None:
    layout = layout_of(num_gpus=3, num_nodes=2)
    assert (layout.world_size, layout.workers_per_node, layout.num_nodes, layout.strategy) == (6, 3, 2, "ddp")
    assert said(layout, "workers").startswith("6 = 2 nodes × 3 CPU processes (as set; ")
    assert said(layout, "workers").endswith("; gloo for CPUs")


@pytest.mark.parametrize(
    ("num_visible", "flags", "world_size", "strategy", "total", "origin", "exchange"),
    [
        (1, {}, 1, "single", "1 = 1 node × 1 GPU", "all that are visible", "no communication needed"),
        (4, {}, 4, "ddp", "4 = 1 node × 4 GPUs", "all that are visible", "nccl for GPUs"),
        (4, {"num_gpus": 2}, 2, "ddp", "2 = 1 node × 2 GPUs", "as set", "nccl for GPUs"),
        (4, {"num_nodes": 2}, 8, "ddp", "8 = 2 nodes × 4 GPUs", "all that are visible", "nccl for GPUs"),
        (4, {"backend": "gloo"}, 4, "ddp", "4 = 1 node × 4 GPUs", "all that are visible", "gloo as set"),
        (1, {"strategy": "ddp"}, 1, "ddp", "1 = 1 node × 1 GPU", "all that are visible", "no communication needed"),
    ],
)
def test_gpus_are_used_as_far_as_they_are_asked_for(
    num_visible: int,
    flags: dict[str, Any],
    world_size: int,
    strategy: str,
    total: str,
    origin: str,
    exchange: str,
) -> None:
    layout = layout_of([H200] * num_visible, **flags)
    assert (layout.device_type, layout.gpu) == ("cuda", H200)
    assert (layout.world_size, layout.strategy, layout.devices_per_worker) == (world_size, strategy, 1)
    assert said(layout, "workers") == f"{total} ({origin}; {num_visible} × NVIDIA H200 visible); {exchange}"


def test_unlike_gpus_are_counted_but_not_named() -> None:
    assert "2 GPUs visible" in said(layout_of([H200, T4]), "workers")


def test_device_cpu_leaves_gpus_alone() -> None:
    layout = layout_of([H200] * 4, device="cpu", num_gpus=8)
    assert (layout.device_type, layout.world_size, layout.backend, layout.gpu) == ("cpu", 8, "gloo", None)
    assert "--device cpu" in said(layout, "workers")


def test_more_workers_than_gpus_are_refused_unless_they_share_on_purpose() -> None:
    with pytest.raises(SettingError) as caught:
        layout_of([H200], num_gpus=2)
    assert str(caught.value) == (
        "2 workers were asked for on this node, but it shows 1 GPU and each worker needs its own; "
        "set --num-gpus 1, or --device cpu, or --backend gloo to let workers share a GPU."
    )
    shared = layout_of([H200], num_gpus=2, backend="gloo")
    assert (shared.world_size, shared.backend, shared.device_type) == (2, "gloo", "cuda")


def test_srun_with_one_visible_gpu_for_each_task_is_taken_as_it_is() -> None:
    launched = Launched(launcher="slurm", world_size=8, local_size=4, num_nodes=2)
    layout = layout_of([H200], launched)
    assert (layout.world_size, layout.workers_per_node, layout.num_nodes, layout.backend) == (8, 4, 2, "nccl")
    assert said(layout, "workers").startswith("8 = 2 nodes × 4 GPUs (started by slurm; ")
    with pytest.raises(SettingError, match="4 workers were asked for on this node, but it shows 2 GPUs"):
        layout_of([H200] * 2, launched)


def test_srun_that_binds_gpus_to_tasks_is_judged_by_all_of_the_node() -> None:
    bound = Launched(launcher="slurm", world_size=4, local_size=4, num_nodes=1, gpus_on_node=4)
    for num_visible in (1, 2, 4):  # --gpus-per-task=1, --gpu-bind=closest on two sockets, none
        assert layout_of([H200] * num_visible, bound).world_size == 4
    too_few = Launched(launcher="slurm", world_size=4, local_size=4, num_nodes=1, gpus_on_node=1)
    with pytest.raises(SettingError) as caught:
        layout_of([H200], too_few)
    assert str(caught.value) == (
        "4 workers were asked for on this node, but it shows 1 GPU and each worker needs its own; start srun with "
        "--ntasks-per-node 1, or ask for more --gpus-per-node, or --device cpu, or --backend gloo to let workers share "
        "a GPU."
    )
    idle = Launched(launcher="slurm", world_size=2, local_size=1, num_nodes=2, gpus_on_node=8)
    assert "leaves GPUs idle: 1 of 8 that it shows are used on this node" in said(
        layout_of([H200] * 8, idle), "workers"
    )


def test_nodes_with_unequal_numbers_of_ranks_are_said_as_they_are() -> None:
    launched = Launched(launcher="mpi", world_size=5, local_size=3, num_nodes=2)
    layout = layout_of((), launched)
    assert layout.world_size == 5
    assert said(layout, "workers").startswith("5 on 2 nodes, 3 of them on this one (started by mpi; ")


def test_dp_is_one_process_with_several_gpus() -> None:
    layout = layout_of([H200] * 4, strategy="dp")
    assert (layout.world_size, layout.workers_per_node, layout.devices_per_worker) == (1, 1, 4)
    assert said(layout, "workers").startswith("1 process that drives 4 GPUs ")
    plan = plan_of([H200] * 4, strategy="dp", batch_size=8)
    assert plan.global_batch_size == 32
    assert plan.learning_rate == pytest.approx(0.04)
    assert plan.warmup_start == pytest.approx(0.01)
    for several in (
        {"num_nodes": 2},
        {"launched": Launched(launcher="torchrun", world_size=2, local_size=2, num_nodes=1)},
    ):
        with pytest.raises(SettingError, match="--strategy dp was set for several processes, but DataParallel is one"):
            layout_of([H200] * 4, strategy="dp", **several)


# --- batch and learning rate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "size", "words"),
    [
        ({}, 32, "32 = 32 per worker × 1 worker × 1 accumulation"),
        ({"num_gpus": 4, "batch_size": 512}, 2048, "2048 = 512 per worker × 4 workers × 1 accumulation"),
        ({"num_gpus": 2, "accumulate": 3}, 192, "192 = 32 per worker × 2 workers × 3 accumulation"),
        ({"num_gpus": 4, "global_batch_size": 64}, 64, "64 as set = 16 per worker × 4 workers × 1 accumulation"),
        ({"num_gpus": 3, "global_batch_size": 64}, 64, "64 as set = 21 to 22 per worker × 3 workers × 1 accumulation"),
        (
            {"num_gpus": 2, "global_batch_size": 64, "batch_size": 32},  # said twice, but in agreement
            64,
            "64 as set = 32 per worker × 2 workers × 1 accumulation",
        ),
        (
            {"num_gpus": 2, "batch_size": "auto"},
            64,
            "64 (32 for each of 2 workers), in passes that --batch-size auto finds once the workers hold the model",
        ),
        (
            {"batch_size": "auto", "global_batch_size": 512},
            512,
            "512 as set, in passes that --batch-size auto finds once the workers hold the model",
        ),
        (
            {"batch_size": 70_000},
            70_000,
            "70000 = 70000 per worker × 1 worker × 1 accumulation; larger than the 60000 training samples, "
            "so a step takes 60000",
        ),
    ],
)
def test_the_global_batch_is_said_with_its_arithmetic(flags: dict[str, Any], size: int, words: str) -> None:
    plan = plan_of(**flags)
    assert plan.global_batch_size == size
    assert said(plan, "global batch") == words


def test_steps_and_the_short_last_one() -> None:
    plan = plan_of(batch_size=512, epochs=3)
    assert (plan.steps_per_epoch, plan.total_steps) == (118, 354)
    assert said(plan, "steps") == (
        "118 an epoch = ceil(60000 samples / 512), the last one with 96; at most 3 epochs = 354 steps"
    )
    assert "the last one" not in said(plan_of(batch_size=500), "steps")


@pytest.mark.parametrize(
    ("flags", "rate", "words"),
    [
        ({}, 0.01, "0.01 as set"),
        ({"num_gpus": 4}, 0.04, "0.04 = 0.01 × 4 (linear)"),
        ({"num_gpus": 4, "batch_size": "auto"}, 0.04, "0.04 = 0.01 × 4 (linear)"),
        ({"num_gpus": 4, "lr_rule": "sqrt"}, 0.02, "0.02 = 0.01 × √4 (sqrt)"),
        ({"num_gpus": 4, "lr_rule": "none"}, 0.01, "0.01 as set for any batch (the batch is 4 × one worker's)"),
        ({"num_gpus": 2, "accumulate": 2}, 0.04, "0.04 = 0.01 × 4 (linear)"),
        ({"num_gpus": 4, "global_batch_size": 64}, 0.01, "0.01 as set, for the global batch as set"),
        (
            {"global_batch_size": 64, "lr_rule": "sqrt"},
            0.01,
            "0.01 as set, for the global batch as set; --lr-rule sqrt has no effect without --base-batch-size",
        ),
    ],
)
def test_the_learning_rate_follows_its_rule(flags: dict[str, Any], rate: float, words: str) -> None:
    plan = plan_of(warmup_epochs=0.0, **flags)
    assert plan.learning_rate == pytest.approx(rate)
    assert said(plan, "learning rate") == words
    assert (plan.warmup_steps, plan.warmup_start) == (0, plan.learning_rate)


_CLIPPED = "; gradient clipped to a norm of 0.5"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "sgd: momentum 0.9, weight decay 0"),
        ({"nesterov": True, "weight_decay": 5e-4}, "sgd: momentum 0.9, Nesterov, weight decay 0.0005"),
        ({"momentum": 0.0, "clip_norm": 0.5}, f"sgd: momentum 0, weight decay 0{_CLIPPED}"),
        ({"optimizer": "adamw"}, "adamw: momentum 0.9, beta2 0.999, eps 1e-08, weight decay 0"),
        ({"optimizer": "lars"}, "lars: momentum 0.9, trust coefficient 0.001, weight decay 0"),
        (
            {"optimizer": "larc", "nesterov": True, "trust_coefficient": 0.02},
            "larc: momentum 0.9, Nesterov, trust coefficient 0.02, weight decay 0",
        ),
        ({"optimizer": "lamb", "beta2": 0.99}, "lamb: momentum 0.9, beta2 0.99, eps 1e-06, weight decay 0"),
        ({"optimizer": "novograd"}, "novograd: momentum 0.9, beta2 0.98, eps 1e-08, weight decay 0"),
        (
            {"optimizer": "novograd", "grad_averaging": True},
            "novograd: momentum 0.9, beta2 0.98, eps 1e-08, grad averaging, weight decay 0",
        ),
    ],
)
def test_the_optimizer_is_said_with_all_that_it_takes(flags: dict[str, Any], words: str) -> None:
    plan = plan_of(**flags)
    assert said(plan, "optimizer") == words
    labels = [label for label, _ in plan.explanation]
    assert labels.index("optimizer") + 1 == labels.index("learning rate")


def test_an_optimizer_of_the_task_is_said_by_its_name_once_it_is_there() -> None:
    config = configured(weight_decay=0.1, clip_norm=0.5, num_gpus=2, base_lr=0.01)
    plan = resolve(config, layout_of(num_gpus=2), FACTS)
    may, made = with_own_optimizer(config, plan), with_own_optimizer(config, plan, "Adam")
    values = "(momentum 0.9, weight decay 0.1)"
    assert said(may, "optimizer") == f"the task's own, or sgd where its optimizer() returns None {values}{_CLIPPED}"
    assert said(made, "optimizer") == f"the task's own Adam{_CLIPPED}"
    grows = said(plan, "learning rate").removeprefix("0.02 = 0.01 × 2 (linear); warm-up from 0.01 over ")
    grows = f" × 2 (linear); warm-up from × 1 over {grows}"
    assert said(may, "learning rate") == f"of the task's optimizer(), or --base-lr 0.01 where it returns None,{grows}"
    assert said(made, "learning rate") == f"of the task's optimizer(){grows}"
    assert made.beginning == replace(plan.beginning, own_rate_factor=2.0)
    assert replace(made, explanation=plan.explanation, beginning=plan.beginning) == plan
    again = replace(config, resumed=made.beginning)
    assert said(with_own_optimizer(again, resolve(again, layout_of(num_gpus=2), FACTS), "Adam"), "learning rate") == (
        f"of the task's optimizer(){grows.replace('(linear)', 'as before')}"
    )
    assert resolve(again, layout_of(num_gpus=2), FACTS).beginning == plan.beginning
    assert [label for label, _ in made.explanation] == [label for label, _ in plan.explanation]


@pytest.mark.parametrize(
    ("flags", "start", "steps"),
    [
        ({"num_gpus": 4, "warmup_epochs": 5.0}, 0.01, 5 * 469),
        ({"num_gpus": 4, "warmup_epochs": 0.5}, 0.01, 234),
        ({"num_gpus": 4, "warmup_from": 0.0}, 0.0, 5 * 469),
        ({"num_gpus": 4, "warmup_from": 0.5}, 0.02, 5 * 469),
        ({"global_batch_size": 128, "warmup_from": 0.5}, 0.005, 5 * 469),
    ],
)
def test_warm_up_starts_from_the_rate_of_one_worker_or_as_set(flags: dict[str, Any], start: float, steps: int) -> None:
    plan = plan_of(**flags)
    assert plan.warmup_start == pytest.approx(start)
    assert plan.warmup_steps == steps
    assert f"; warm-up from {start:g} over " in said(plan, "learning rate")


@pytest.mark.parametrize("flags", [{}, {"num_gpus": 4, "global_batch_size": 64}, {"num_gpus": 4, "warmup_from": 1.0}])
def test_a_warm_up_that_would_start_from_the_full_rate_is_said_to_be_none(flags: dict[str, Any]) -> None:
    plan = plan_of(**flags)
    assert plan.warmup_start == plan.learning_rate
    assert "; no warm-up, as it would start from the full rate " in said(plan, "learning rate")


def test_a_fixed_global_batch_has_one_schedule_on_any_number_of_workers() -> None:
    plans = [plan_of(num_gpus=size, global_batch_size=64) for size in (1, 2, 8)]
    assert len({(plan.learning_rate, plan.warmup_start, plan.warmup_steps, plan.total_steps) for plan in plans}) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"decay": "cosine"}, "; then down a cosine to 0 at epoch 40"),
        ({"decay": "linear", "epochs": 7}, "; then down a line to 0 at epoch 7"),
        ({"decay": "step"}, "; then × 0.1 every 10 epochs"),
    ],
)
def test_the_decay_is_said(flags: dict[str, Any], words: str) -> None:
    assert said(plan_of(**flags), "learning rate").endswith(words)


def test_a_resumed_run_keeps_its_batch_and_rate_on_any_number_of_workers() -> None:
    before = Effective(global_batch_size=64, learning_rate=0.02, warmup_start=0.01)
    config = replace(configured(num_gpus=3, batch_size=32, base_lr=0.01), resumed=before)
    plan = resolve(config, resolve_layout(config, ()), FACTS)
    assert (plan.global_batch_size, plan.learning_rate, plan.warmup_start) == (64, 0.02, 0.01)
    assert said(plan, "global batch") == "64 as before = 21 to 22 per worker × 3 workers × 1 accumulation"
    assert said(plan, "learning rate").startswith("0.02 as before; warm-up from 0.01 over ")


@pytest.mark.parametrize(
    ("flags", "accumulate", "batch", "graph"),
    [
        (
            {"global_batch_size": 512},
            4,
            "512 as set = 4 passes of 128 (auto: why) × 1 worker",
            "off: a replay writes gradients and 4 passes are to be summed",
        ),
        (
            {"global_batch_size": 512},
            1,
            "512 as set = 1 pass of 512 (auto: why) × 1 worker",
            "off: no room",
        ),
        (
            {"global_batch_size": 512, "graph": True},
            1,
            "512 as set = 1 pass of 512 (auto: why) × 1 worker",
            "on: as set",
        ),
        (
            {"num_gpus": 2},
            3,
            "64 (32 for each of 2 workers) = 3 passes of 10 to 11 (auto: why) × 2 workers",
            "off: 2 workers exchange gradients during a step",
        ),
        (
            {"global_batch_size": 70_000},
            600,
            "70000 as set = 600 passes of 100 (auto: why) × 1 worker; larger than the 60000 training samples, "
            "so a step takes 60000",
            "off: a replay writes gradients and 600 passes are to be summed",
        ),
    ],
)
def test_the_passes_that_were_found_replace_the_search_in_the_plan(
    flags: dict[str, Any], accumulate: int, batch: str, graph: str
) -> None:
    flags = {"batch_size": "auto", "num_gpus": 1, **flags}
    before = plan_of([H200] * 2, **flags)
    plan = with_passes(configured(**flags), before, accumulate, "why", "no room")
    assert (said(plan, "global batch"), said(plan, "graph")) == (batch, graph)
    assert (plan.accumulate, plan.graph) == (accumulate, graph.startswith("on"))
    assert [label for label, _ in plan.explanation] == [label for label, _ in before.explanation]
    assert [stage.accumulate for stage in plan.stages] == [accumulate]
    searched = ("accumulate", "graph", "stages", "noise_scale", "noise_scale_reason", "explanation")
    assert replace(plan, **{name: getattr(before, name) for name in searched}) == before
    assert "--batch-size auto finds" not in "".join(plan.lines())


def test_a_graph_that_was_set_does_not_sum_the_passes_that_were_found() -> None:
    flags: dict[str, Any] = {"batch_size": "auto", "global_batch_size": 512, "graph": True}
    with pytest.raises(
        SettingError, match=r"--graph was set, but a replay writes gradients and 2 passes .*; leave it out"
    ):
        with_passes(configured(**flags), plan_of([H200], **flags), 2, "why", None)


@settings(max_examples=200)
@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 5), st.one_of(st.none(), st.integers(45, 5000)))
def test_the_global_batch_is_the_sum_of_all_shares(
    batch_size: int, num_workers: int, accumulate: int, wanted: int | None
) -> None:
    flags: dict[str, Any] = {"num_gpus": num_workers, "accumulate": accumulate}
    flags |= {"batch_size": batch_size} if wanted is None else {"global_batch_size": wanted}
    plan = plan_of(**flags)
    total = plan.global_batch_size
    assert total == (batch_size * num_workers * accumulate if wanted is None else wanted)
    shares = [part(0, total, worker, num_workers) for worker in range(num_workers)]
    sizes = [
        stop - start
        for share in shares
        for start, stop in (part(*share, index, accumulate) for index in range(accumulate))
    ]
    assert sum(sizes) == total
    assert min(sizes) >= 1
    low, high = min(sizes), max(sizes)
    if total % (num_workers * accumulate) == 0 and wanted is None:
        assert low == high == batch_size
    # What is printed is what happens.
    numbers = re.search(r"= (\d+)(?: to (\d+))? per worker", said(plan, "global batch"))
    assert numbers
    assert (int(numbers[1]), int(numbers[2] or numbers[1])) == (low, high)


# --- precision, layout in memory, compile, loader ---------------------------------------------------------------------


V100_WORDS = (
    "fp16: fast on Tesla V100-SXM2-16GB (125 against 15.7 TFLOP/s in fp32), which has no bf16; "
    "losses are scaled, weights stay fp32"
)
T4_WORDS = (
    "fp16: fast on Tesla T4 (65 against 8.1 TFLOP/s in fp32), which has no bf16; losses are scaled, weights stay fp32"
)


@pytest.mark.parametrize(
    ("gpu", "precision", "words"),
    [
        (None, "fp32", "fp32: CPUs gain little from 16 bits"),
        (H200, "bf16", "bf16: fast on NVIDIA H200 (989 against 67 TFLOP/s in fp32), range of fp32; weights stay fp32"),
        (V100, "fp16", V100_WORDS),
        (T4, "fp16", T4_WORDS),
        (RTX4090, "bf16", "bf16: fast on NVIDIA GeForce RTX 4090, range of fp32; weights stay fp32"),
    ],
)
def test_precision_suits_the_device(gpu: Gpu | None, precision: str, words: str) -> None:
    plan = plan_of([gpu] if gpu else [])
    assert plan.precision == precision
    assert said(plan, "precision") == words


@pytest.mark.parametrize(
    "gpu", [P100, Gpu(name="Quadro RTX 6000", memory_bytes=24 * 2**30, capability=(7, 5))], ids=lambda gpu: gpu.name
)
def test_bf16_is_not_chosen_for_a_gpu_without_it(gpu: Gpu) -> None:
    assert not gpu.has_bf16
    assert plan_of([gpu]).precision != "bf16"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_a_precision_that_was_set_is_kept(precision: str) -> None:
    assert plan_of(precision=precision).precision == precision
    assert said(plan_of([H200], precision=precision), "precision") == f"{precision}: as set"


def test_channels_last_is_for_gpus_and_arm_and_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert plan_of([H200]).channels_last
    assert not plan_of([H200], precision="fp64").channels_last
    assert not plan_of().channels_last
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert plan_of().channels_last
    assert plan_of(channels_last=True).channels_last
    assert not plan_of([H200], channels_last=False).channels_last


def test_compile_and_autotune_are_weighed_against_their_cost() -> None:
    seconds_an_epoch = 60_000 * 11.08e9 / (989e12 * choices._ASSUMED_UTILISATION)
    cost_s, saves = choices.COMPILE_COST_S, 0.05
    pays_from = math.floor(cost_s / saves / seconds_an_epoch) + 1
    for epochs, is_on in ((pays_from - 1, False), (pays_from, True)):
        plan = plan_of([H200], epochs=epochs)
        seconds = epochs * seconds_an_epoch
        assert plan.compile is is_on
        assert said(plan, "compile") == (
            f"{'on: saves' if is_on else 'off: would save'} about {seconds * saves:.0f} s "
            f"of an estimated {seconds:.0f} s, costs about {cost_s:.0f} s"
        )
    assert not plan_of([H200] * 2, epochs=pays_from).compile  # two workers have half the work each
    assert plan_of([H200], epochs=4000).autotune
    assert said(plan_of([H200], epochs=1), "autotune").startswith("off: would save about 0 s")


def test_what_cannot_be_estimated_is_off_and_says_so() -> None:
    unknown = "off: its gain cannot be estimated for this task and device"
    for plan in (plan_of([RTX4090], epochs=4000), plan_of([H200], replace(FACTS, flops_per_sample=None), epochs=4000)):
        assert (plan.compile, plan.autotune) == (False, False)
        assert said(plan, "compile") == said(plan, "autotune") == unknown
    assert said(plan_of([H200], replace(FACTS, compile_saves=None), epochs=4000), "compile") == unknown
    fused = plan_of([H200], replace(FACTS, compile_saves=0.0), epochs=4000)
    assert said(fused, "compile") == "off: this task's layers are fused already and faster without"
    assert said(plan_of(epochs=4000), "compile") == "off: does not pay on CPUs"
    assert plan_of(compile=True).compile
    assert not plan_of([H200], compile=False, epochs=4000).compile


@pytest.mark.parametrize(
    ("train_bytes", "asked", "loader", "reason"),
    [
        (60_000 * 792, "auto", "resident", "45 MiB are kept on each device, batches are made there"),
        (60_000, "auto", "resident", "59 KiB are kept on each device, batches are made there"),
        (600, "auto", "resident", "600 bytes are kept on each device, batches are made there"),
        (9 * 2**30, "auto", "streamed", "9.0 GiB are more than the 8.0 GiB that are kept on a device"),
        (None, "auto", "streamed", "the data set is not held in tensors"),
        (60_000 * 792, "streamed", "streamed", "as set"),
        (9 * 2**30, "resident", "resident", "as set"),
    ],
)
def test_the_loader_follows_the_size_of_the_data(train_bytes: int | None, asked: str, loader: str, reason: str) -> None:
    plan = plan_of(facts=replace(FACTS, train_bytes=train_bytes), loader=asked)
    assert plan.loader == loader
    assert said(plan, "data") == f"{loader}: {reason}"


@pytest.mark.parametrize(
    ("text", "steps", "words"),
    [
        ("1ep", 1875, "every 1875 steps = 1 × 1875; the last 2 and the best are kept"),
        ("0.25ep", 469, "every 469 steps = 0.25 × 1875; the last 2 and the best are kept"),
        ("2ep", 3750, "every 3750 steps = 2 × 1875; the last 2 and the best are kept"),
        ("0.00001ep", 1, "every 1 step = 1e-05 × 1875; the last 2 and the best are kept"),
        ("500", 500, "every 500 steps; the last 2 and the best are kept"),
        ("1e3", 1000, "every 1000 steps; the last 2 and the best are kept"),
        ("0", None, "only at the end (--checkpoint-every 0)"),
        ("0ep", None, "only at the end (--checkpoint-every 0)"),
    ],
)
def test_checkpoints_by_steps_and_by_epochs(text: str, steps: int | None, words: str) -> None:
    plan = plan_of(checkpoint_every=text)
    assert plan.checkpoint_steps == steps
    assert said(plan, "checkpoints") == words


def test_of_layers_that_the_model_has_not_nothing_is_said_unless_they_were_asked_for() -> None:
    flags: dict[str, Any] = {"num_gpus": 2, "sync_batch_norm": True}
    plan, config = plan_of(**flags), configured(**flags)
    assert with_layers(config, plan, has_convolutions=True, has_batch_norms=True) == plan
    without = with_layers(config, plan, has_convolutions=False, has_batch_norms=False)
    assert said(without, "batch norm") == "as set, without effect: the model has no batch norm"
    assert {label for label, _ in plan.explanation} - {label for label, _ in without.explanation} == {"channels last"}
    unknown = with_layers(config, plan, has_convolutions=None, has_batch_norms=None)
    assert said(unknown, "batch norm") == "statistics over all 2 workers, where the model has a batch norm"


def test_the_lines_are_aligned_and_hold_every_label_once() -> None:
    plan = plan_of(num_gpus=2, deterministic=True, sync_batch_norm=True)
    labels = [label for label, _ in plan.explanation]
    assert len(set(labels)) == len(labels)
    column = max(len(label) for label in labels) + 2
    for line, (label, text) in zip(plan.lines(), plan.explanation, strict=True):
        assert line[:column].strip() == label
        assert line[column:] == text
    assert said(plan, "seed") == "0, deterministic"
    assert said(plan, "batch norm") == "statistics over all 2 workers"
    stop = "40 epochs (--target-accuracy or --target-loss would set a target); "
    assert said(plan_of(), "stop") == f"{stop}on divergence it ends (--on-divergence stop)"


def test_the_plan_is_a_pure_function() -> None:
    assert plan_of([H200] * 4, epochs=3) == plan_of([H200] * 4, epochs=3)
    assert math.isfinite(plan_of([H200] * 4).learning_rate)


# --- streams ----------------------------------------------------------------------------------------------------------


STREAM = replace(FACTS, num_train=0, num_validation=None, is_stream=True, train_bytes=None)


def test_the_user_says_how_many_samples_of_a_stream_make_an_epoch() -> None:
    plan = plan_of(facts=STREAM, epoch_samples=1000, batch_size=32)
    assert (plan.facts.num_train, plan.steps_per_epoch, plan.loader) == (1000, 32, "streamed")
    assert said(plan, "data") == (
        "streamed: a stream in its own order; every worker reads it, by one loading process, as its order cannot be "
        "shared out; 1000 samples are an epoch, and the next one goes on from there"
    )
    itself = plan_of(facts=replace(STREAM, num_train=50), loader_workers=0)
    assert itself.facts.num_train == 50
    assert said(itself, "data") == "streamed: a stream in its own order; every worker reads it, itself"


@pytest.mark.parametrize(
    ("facts", "flags", "sentence"),
    [
        (
            STREAM,
            {},
            "train_data() gave a stream that does not tell its length, but the steps of an epoch, warm-up and decay "
            "are counted in it; set --epoch-samples to the samples that make an epoch, or give the stream a __len__.",
        ),
        (
            FACTS,
            {"epoch_samples": 5},
            "--epoch-samples 5 was set, but the training set is an epoch of 60000 samples; leave it out: it "
            "is for streams whose length is not known.",
        ),
        (
            STREAM,
            {"epoch_samples": 0},
            "--epoch-samples 0 was set, but it must be at least 1; set --epoch-samples 1 or more.",
        ),
        (
            STREAM,
            {"epoch_samples": 5, "loader_workers": 2},
            "--loader-workers 2 was set, but the training set is a stream, which one process reads in its order and "
            "several would read several times; set --loader-workers 1, or 0 to read it in the worker itself.",
        ),
    ],
)
def test_what_cannot_be_of_a_stream_is_said(facts: Facts, flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError) as raised:
        plan_of(facts=facts, **flags)
    assert str(raised.value) == sentence


# --- targets and utilisation ------------------------------------------------------------------------------------------


def test_the_stop_line_says_which_targets_apply() -> None:
    lost = "; on divergence it ends (--on-divergence stop)"
    assert said(plan_of(), "stop") == f"40 epochs (--target-accuracy or --target-loss would set a target){lost}"
    by_accuracy = "validation accuracy of 0.9 held for 2 epochs, or 40 epochs"
    has_one = replace(FACTS, has_accuracy=True)
    assert said(plan_of(facts=has_one, target_accuracy=0.9), "stop") == by_accuracy + lost
    unknown = "validation accuracy of 0.9 (if the task reports one)"
    assert said(plan_of(target_accuracy=0.9), "stop") == f"{unknown} held for 2 epochs, or 40 epochs{lost}"
    both = f"{unknown} or validation loss of 1.5 held for 1 epoch, or 40 epochs"
    assert said(plan_of(target_accuracy=0.9, target_loss=1.5, patience=1), "stop") == both + lost
    text = replace(FACTS, has_accuracy=False)
    none = "40 epochs (this task reports no accuracy; --target-loss would set a target)"
    assert said(plan_of(facts=text, target_accuracy=0.9), "stop") == none + lost
    by_loss = "validation loss of 1.5 held for 2 epochs, or 40 epochs"
    assert said(plan_of(facts=text, target_loss=1.5), "stop") == by_loss + lost


def test_the_data_line_says_what_is_trained_on() -> None:
    facts = replace(FACTS, data="all there is", data_sha256="abc")
    assert said(plan_of(facts=facts), "data") == said(plan_of(), "data") + "; all there is, SHA-256 abc"


def test_a_run_goes_on_with_the_data_it_was_started_on_alone() -> None:
    effective = Effective(global_batch_size=64, learning_rate=0.1, warmup_start=0.1, data_sha256="abc")
    config = replace(configured(), resumed=effective)
    for digest in ("abc", None):
        resolve(config, layout_of(), replace(FACTS, data_sha256=digest))
    resolve(replace(config, resumed=replace(effective, data_sha256=None)), layout_of(), FACTS)
    with pytest.raises(SettingError) as caught:
        resolve(config, layout_of(), replace(FACTS, data="all there is", data_sha256="def"))
    assert str(caught.value) == (
        "a run that was trained on data of SHA-256 abc was to go on, but the data here (all there is) has def; "
        "go on where the same data is (another release of Python has another library), or start a new run."
    )


@pytest.mark.parametrize(
    ("gpu", "precision", "peak_tflops"),
    [(H200, "bf16", 989.0), (H200, "fp16", 989.0), (H200, "tf32", 494.0), (H200, "fp32", 67.0), (V100, "fp32", 15.7)],
)
def test_mfu_is_against_the_peak_of_the_precision_and_of_all_devices(
    gpu: Gpu, precision: str, peak_tflops: float
) -> None:
    plan = plan_of([gpu, gpu], precision=precision)
    assert plan.mfu(2000.0) == pytest.approx(2000.0 * 11.08e9 / (2 * peak_tflops * 1e12))
    assert plan.mfu_reason() is None


def test_where_mfu_is_not_known_there_is_a_reason() -> None:
    reasons = {
        "the peak of the CPUs is not known": plan_of(),
        "no published peak of NVIDIA GeForce RTX 4090 in bf16 is known": plan_of([RTX4090]),
        "no published peak of NVIDIA H200 in fp64 is known": plan_of([H200], precision="fp64"),
        "the task does not say how many operations a sample takes (facts().flops_per_sample)": plan_of(
            [H200], replace(FACTS, flops_per_sample=None)
        ),
    }
    for reason, plan in reasons.items():
        assert plan.mfu(2000.0) is None
        assert plan.mfu_reason() == reason
