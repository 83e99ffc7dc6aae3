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
from stormo.config.plan import Facts, Plan, choices, resolve, with_layers, with_micro_batches, with_task_optimizer
from stormo.config.schema import ResolvedBatch, TrainConfig
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


def _minor(gpus: Sequence[Gpu] = (), **flags: Any) -> list[str]:
    lines = plan_of(gpus, **flags).minor_lines(configured(**flags))
    return sorted(re.split("  +", line)[0] for line in lines)


def test_lines_that_say_nothing_of_a_run_are_minor_unless_their_setting_was_set() -> None:
    on_cpu = ["autotune", "batch norm", "channels last", "checkpoints", "compile", "graph", "noise scale"]
    assert _minor() == on_cpu
    assert _minor(graph=False) == [label for label in on_cpu if label != "graph"]
    assert _minor(keep_checkpoints=5) == [label for label in on_cpu if label != "checkpoints"]
    assert _minor(num_gpus=2) == ["autotune", "channels last", "checkpoints", "compile", "graph"]
    assert _minor([T4]) == ["batch norm", "checkpoints", "noise scale"]
    assert _minor([T4, T4]) == ["checkpoints", "link"]
    assert _minor([T4, T4], tune_link=True) == ["checkpoints"]


def test_settings_of_an_optimizer_are_taken_where_they_belong_and_a_tasks_own_are_never_refused() -> None:
    for flags in (
        {"optimizer": "larc", "trust_coefficient": 0.02, "nesterov": True},
        {"optimizer": "novograd", "beta2": 0.5, "eps": 1e-3, "grad_averaging": True},
        {"optimizer": "sgd", "grad_averaging": False},
    ):
        plan_of(**flags)
    config = options.make_config({"optimizer": "sgd"}, None, {"optimizer": "adamw", "beta2": 0.95})
    resolve(config, layout_of(), FACTS)


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
    with pytest.raises(SettingError):
        layout_of([H200], num_gpus=2)
    shared = layout_of([H200], num_gpus=2, backend="gloo")
    assert (shared.world_size, shared.backend, shared.device_type) == (2, "gloo", "cuda")


def test_srun_with_one_visible_gpu_for_each_task_is_taken_as_it_is() -> None:
    launched = Launched(launcher="slurm", world_size=8, local_size=4, num_nodes=2)
    layout = layout_of([H200], launched)
    assert (layout.world_size, layout.workers_per_node, layout.num_nodes, layout.backend) == (8, 4, 2, "nccl")
    assert said(layout, "workers").startswith("8 = 2 nodes × 4 GPUs (started by slurm; ")
    with pytest.raises(SettingError, match="it has 2 GPUs"):
        layout_of([H200] * 2, launched)


def test_srun_that_binds_gpus_to_tasks_is_judged_by_all_of_the_node() -> None:
    bound = Launched(launcher="slurm", world_size=4, local_size=4, num_nodes=1, gpus_on_node=4)
    for num_visible in (1, 2, 4):  # --gpus-per-task=1, --gpu-bind=closest on two sockets, none
        assert layout_of([H200] * num_visible, bound).world_size == 4
    too_few = Launched(launcher="slurm", world_size=4, local_size=4, num_nodes=1, gpus_on_node=1)
    with pytest.raises(SettingError, match="--ntasks-per-node 1"):
        layout_of([H200], too_few)
    idle = Launched(launcher="slurm", world_size=2, local_size=1, num_nodes=2, gpus_on_node=8)
    assert "leaves GPUs idle: 1 of 8" in said(layout_of([H200] * 8, idle), "workers")


def test_nodes_with_unequal_numbers_of_ranks_are_said_as_they_are() -> None:
    launched = Launched(launcher="mpi", world_size=5, local_size=3, num_nodes=2)
    layout = layout_of((), launched)
    assert layout.world_size == 5
    assert said(layout, "workers").startswith("5 on 2 nodes, 3 of them on this one (started by mpi; ")


def test_dp_is_one_process_with_several_gpus() -> None:
    layout = layout_of([H200] * 4, strategy="dp")
    assert (layout.world_size, layout.workers_per_node, layout.devices_per_worker) == (1, 1, 4)
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
    ("flags", "size", "text"),
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
            "64 (32 for each of 2 workers), in micro-batches that --batch-size auto finds once the workers hold the "
            "model",
        ),
        (
            {"batch_size": "auto", "global_batch_size": 512},
            512,
            "512 as set, in micro-batches that --batch-size auto finds once the workers hold the model",
        ),
        (
            {"batch_size": 70_000},
            70_000,
            "70000 = 70000 per worker × 1 worker × 1 accumulation; larger than the 60000 training samples, "
            "so a step takes 60000",
        ),
    ],
)
def test_the_global_batch_is_explained_with_its_arithmetic(flags: dict[str, Any], size: int, text: str) -> None:
    plan = plan_of(**flags)
    assert plan.global_batch_size == size
    assert said(plan, "global batch") == text


def test_steps_and_the_short_last_one() -> None:
    plan = plan_of(batch_size=512, epochs=3)
    assert (plan.steps_per_epoch, plan.total_steps) == (118, 354)
    assert said(plan, "steps") == (
        "118 an epoch = ceil(60000 samples / 512), the last one with 96; at most 3 epochs = 354 steps"
    )
    assert "the last one" not in said(plan_of(batch_size=500), "steps")


@pytest.mark.parametrize(
    ("flags", "rate", "text"),
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
def test_the_learning_rate_follows_its_rule(flags: dict[str, Any], rate: float, text: str) -> None:
    plan = plan_of(warmup_epochs=0.0, **flags)
    assert plan.learning_rate == pytest.approx(rate)
    assert said(plan, "learning rate") == text
    assert (plan.warmup_steps, plan.warmup_start) == (0, plan.learning_rate)


def test_the_learning_rates_of_a_task_optimizer_are_scaled_as_the_base_rate() -> None:
    config = configured(num_gpus=2, base_lr=0.01)
    plan = resolve(config, layout_of(num_gpus=2), FACTS)
    made = with_task_optimizer(config, plan, "Adam")
    assert replace(made, explanation=plan.explanation) == plan
    again = replace(config, resumed=made.initial)
    resumed = with_task_optimizer(again, resolve(again, layout_of(num_gpus=2), FACTS), "Adam")
    assert "× 2 as before" in said(resumed, "learning rate")
    assert resolve(again, layout_of(num_gpus=2), FACTS).initial == plan.initial
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


@pytest.mark.parametrize("flags", [{}, {"num_gpus": 4, "global_batch_size": 64}, {"num_gpus": 4, "warmup_from": 1.0}])
def test_a_warm_up_that_would_start_from_the_full_rate_is_said_to_be_none(flags: dict[str, Any]) -> None:
    plan = plan_of(**flags)
    assert plan.warmup_start == plan.learning_rate
    assert "; no warm-up" in said(plan, "learning rate")


@pytest.mark.parametrize(("epochs", "is_whole"), [(4, True), (5, True), (6, False)])
def test_a_warm_up_that_takes_the_whole_training_is_said_so(epochs: int, is_whole: bool) -> None:
    text = said(plan_of(num_gpus=4, epochs=epochs), "learning rate")
    assert ("the whole training (--warmup-epochs sets less)" in text) == is_whole


def test_a_fixed_global_batch_has_one_schedule_on_any_number_of_workers() -> None:
    plans = [plan_of(num_gpus=size, global_batch_size=64) for size in (1, 2, 8)]
    assert len({(plan.learning_rate, plan.warmup_start, plan.warmup_steps, plan.total_steps) for plan in plans}) == 1


def test_a_resumed_run_keeps_its_batch_and_rate_on_any_number_of_workers() -> None:
    before = ResolvedBatch(global_batch_size=64, learning_rate=0.02, warmup_start=0.01)
    config = replace(configured(num_gpus=3, batch_size=32, base_lr=0.01), resumed=before)
    plan = resolve(config, resolve_layout(config, ()), FACTS)
    assert (plan.global_batch_size, plan.learning_rate, plan.warmup_start) == (64, 0.02, 0.01)


@pytest.mark.parametrize(
    ("flags", "accumulate", "batch", "graph"),
    [
        ({"global_batch_size": 512}, 4, "512 as set = 4 micro-batches of 128 (auto: why) × 1 worker", False),
        ({"global_batch_size": 512}, 1, "512 as set = 1 micro-batch of 512 (auto: why) × 1 worker", False),
        ({"global_batch_size": 512, "graph": True}, 1, "512 as set = 1 micro-batch of 512 (auto: why)", True),
        ({"num_gpus": 2}, 3, "64 (32 for each of 2 workers) = 3 micro-batches of 10 to 11 (auto: why) × 2", False),
        ({"global_batch_size": 70_000}, 600, "70000 as set = 600 micro-batches of 100 (auto: why) × 1 worker;", False),
    ],
)
def test_the_micro_batches_that_were_found_are_put_into_the_plan(
    flags: dict[str, Any], accumulate: int, batch: str, graph: bool
) -> None:
    flags = {"batch_size": "auto", "num_gpus": 1, **flags}
    before = plan_of([H200] * 2, **flags)
    plan = with_micro_batches(configured(**flags), before, accumulate, "why", "no room")
    assert said(plan, "global batch").startswith(batch)
    assert (plan.accumulate, plan.graph) == (accumulate, graph)
    assert [label for label, _ in plan.explanation] == [label for label, _ in before.explanation]
    assert [stage.accumulate for stage in plan.stages] == [accumulate]
    searched = ("accumulate", "graph", "stages", "noise_scale", "noise_scale_reason", "batch_text", "explanation")
    assert replace(plan, **{name: getattr(before, name) for name in searched}) == before
    assert "--batch-size auto finds" not in "".join(plan.lines())


def test_ghost_batches_follow_the_micro_batches_that_were_found() -> None:
    flags: dict[str, Any] = {"ghost_batch_size": 32, "batch_size": "auto", "global_batch_size": 512}
    plan = with_micro_batches(configured(**flags), plan_of(**flags), 4, "why", None)
    assert said(plan, "batch norm").endswith("4 of 32 in a micro-batch of 128")


def test_a_graph_that_was_set_does_not_sum_the_micro_batches_that_were_found() -> None:
    flags: dict[str, Any] = {"batch_size": "auto", "global_batch_size": 512, "graph": True}
    with pytest.raises(SettingError, match="--graph was set"):
        with_micro_batches(configured(**flags), plan_of([H200], **flags), 2, "why", None)


@settings(max_examples=100)
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


@pytest.mark.parametrize(
    ("gpu", "precision"), [(None, "fp32"), (H200, "bf16"), (V100, "fp16"), (T4, "fp16"), (RTX4090, "bf16")]
)
def test_precision_suits_the_device(gpu: Gpu | None, precision: str) -> None:
    assert plan_of([gpu] if gpu else []).precision == precision


@pytest.mark.parametrize("flags", [{"compress": "powersgd"}, {"strategy": "server"}])
def test_what_takes_no_scaled_losses_trains_in_fp32_on_gpus_without_bf16(flags: dict[str, Any]) -> None:
    assert plan_of([V100] * 4, **flags).precision == "fp32"
    assert plan_of([V100] * 4, compress="fp16").precision == "fp16"


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
    two = {"gpus": [H200] * 2, "num_gpus": 2}
    assert plan_of(**two, strategy="fsdp").channels_last
    assert not plan_of(**two, strategy="fsdp", compile=True).channels_last
    assert not plan_of(**two, strategy="pipeline").channels_last
    assert not plan_of([H200] * 4, num_gpus=4, mesh="pipeline=2,shard=2").channels_last


def test_compile_and_autotune_are_weighed_against_their_cost() -> None:
    seconds_an_epoch = 60_000 * 11.08e9 / (989e12 * choices._ASSUMED_UTILISATION)
    cost_s, saves = choices.COMPILE_COST_S, 0.05
    pays_from = math.floor(cost_s / saves / seconds_an_epoch) + 1
    for epochs, is_on in ((pays_from - 1, False), (pays_from, True)):
        plan = plan_of([H200], epochs=epochs)
        assert plan.compile is is_on
    assert not plan_of([H200] * 2, epochs=pays_from).compile  # two workers have half the work each
    pays_from = math.floor(choices.AUTOTUNE_COST_S / choices.AUTOTUNE_SAVES / seconds_an_epoch) + 1
    assert [plan_of([H200], epochs=epochs).autotune for epochs in (pays_from - 1, pays_from)] == [False, True]
    assert said(plan_of([H200], epochs=1), "autotune").startswith("off: would save about 0 s")


@pytest.mark.parametrize(("gpus", "flags"), [([], {}), ([H200], {"deterministic": True, "epochs": 4000})])
def test_autotuning_is_off_where_it_has_no_effect(gpus: list[Gpu], flags: dict[str, Any]) -> None:
    assert not plan_of(gpus, **flags).autotune
    with pytest.raises(SettingError, match="--autotune was set"):
        plan_of(gpus, autotune=True, **flags)
    resumed = replace(configured(autotune=True, **flags), given=frozenset())
    assert not resolve(resumed, layout_of(gpus), FACTS).autotune


def test_what_cannot_be_estimated_is_off() -> None:
    for plan in (plan_of([RTX4090], epochs=4000), plan_of([H200], replace(FACTS, flops_per_sample=None), epochs=4000)):
        assert (plan.compile, plan.autotune) == (False, False)
    for saves in (None, 0.0):
        assert not plan_of([H200], replace(FACTS, compile_saves=saves), epochs=4000).compile
    assert plan_of(compile=True).compile
    assert not plan_of([H200], compile=False, epochs=4000).compile


@pytest.mark.parametrize(
    ("train_bytes", "asked", "loader"),
    [
        (60_000, "auto", "resident"),
        (9 * 2**30, "auto", "streamed"),
        (None, "auto", "streamed"),
        (60_000, "streamed", "streamed"),
        (9 * 2**30, "resident", "resident"),
    ],
)
def test_the_loader_follows_the_size_of_the_data(train_bytes: int | None, asked: str, loader: str) -> None:
    assert plan_of(facts=replace(FACTS, train_bytes=train_bytes), loader=asked).loader == loader


@pytest.mark.parametrize(
    ("text", "steps"),
    [("1ep", 1875), ("0.25ep", 469), ("2ep", 3750), ("0.00001ep", 1), ("500", 500), ("1e3", 1000), ("0", None)],
)
def test_checkpoints_by_steps_and_by_epochs(text: str, steps: int | None) -> None:
    checkpoints = plan_of(checkpoint_every=text).checkpoints
    assert (checkpoints and checkpoints.steps) == steps


def test_lines_on_layers_that_the_model_lacks_are_left_out_unless_they_were_set() -> None:
    flags: dict[str, Any] = {"num_gpus": 2, "sync_batch_norm": True}
    plan, config = plan_of(**flags), configured(**flags)
    assert with_layers(config, plan, has_convolutions=True, has_batch_norms=True) == plan
    without = with_layers(config, plan, has_convolutions=False, has_batch_norms=False)
    assert {label for label, _ in plan.explanation} - {label for label, _ in without.explanation} == {"channels last"}


def test_the_plan_is_a_pure_function() -> None:
    assert plan_of([H200] * 4, epochs=3) == plan_of([H200] * 4, epochs=3)


# --- streams ----------------------------------------------------------------------------------------------------------


STREAM = replace(FACTS, num_train=0, num_validation=None, is_stream=True, train_bytes=None)


def test_the_user_sets_the_samples_of_an_epoch_of_a_stream() -> None:
    plan = plan_of(facts=STREAM, epoch_samples=1000, batch_size=32)
    assert (plan.facts.num_train, plan.steps_per_epoch, plan.loader) == (1000, 32, "streamed")
    assert plan_of(facts=replace(STREAM, num_train=50), loader_workers=0).facts.num_train == 50


# --- data and utilisation ---------------------------------------------------------------------------------------------


def test_a_run_resumes_with_its_own_data_only() -> None:
    effective = ResolvedBatch(global_batch_size=64, learning_rate=0.1, warmup_start=0.1, data_sha256="abc")
    config = replace(configured(), resumed=effective)
    for digest in ("abc", None):
        resolve(config, layout_of(), replace(FACTS, data_sha256=digest))
    resolve(replace(config, resumed=replace(effective, data_sha256=None)), layout_of(), FACTS)
    with pytest.raises(SettingError, match=r"SHA-256 abc .*all there is.* has def"):
        resolve(config, layout_of(), replace(FACTS, data="all there is", data_sha256="def"))


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


# --- parameter servers ------------------------------------------------------------------------------------------------


def test_a_synchronous_server_run_resumes_on_one_worker() -> None:
    began = ResolvedBatch(global_batch_size=8, learning_rate=1.0, warmup_start=1.0)
    config = replace(configured(num_gpus=1, strategy="server", servers=2), resumed=began)
    plan = resolve(config, resolve_layout(config, [V100]), FACTS)
    assert (plan.layout.strategy, plan.precision) == ("single", "fp32")  # the precision its servers had
    for changed, sentence in (({"staleness": 2}, "or --staleness 0"), ({"servers": 0}, "--servers 0 was set")):
        with pytest.raises(SettingError, match=sentence):
            resolve_layout(replace(config, workers=replace(config.workers, **changed)), [V100])


def test_synchronous_servers_have_the_gradient_of_the_whole_batch() -> None:
    flags: dict[str, Any] = {"deterministic": True, "sync_batch_norm": True, "clip_norm": 1.0, "gradient_noise": 0.1}
    plan = plan_of(strategy="server", num_gpus=4, **flags)
    assert (plan.noise_scale, plan.graph, plan.layout.data_size) == (False, False, 4)


def test_a_noise_scale_that_a_run_began_with_is_left_out_where_it_cannot_be_measured() -> None:
    asked = configured(num_gpus=2, strategy="fsdp", noise_scale=True)
    with pytest.raises(SettingError, match="--noise-scale was set"):
        resolve(asked, resolve_layout(asked, [H200] * 2), FACTS)
    inherited = replace(asked, given=asked.given - {"noise_scale"})
    assert not resolve(inherited, resolve_layout(inherited, [H200] * 2), FACTS).noise_scale
