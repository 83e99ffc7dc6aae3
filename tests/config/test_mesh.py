"""Meshes: their arithmetic, presets and pipelines."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.mesh import AXES, Mesh, mesh_of, parse_mesh, preset_mesh
from stormo.config.plan import Facts, Plan, resolve
from stormo.config.strategies import SPECS
from stormo.errors import SettingError

FACTS = Facts(num_train=1000, num_validation=100)


def _plan(**flags: Any) -> Plan:
    config = options.make_config({"device": "cpu", **flags}, None)
    return resolve(config, resolve_layout(config, ()), FACTS)


def test_workers_that_share_a_model_share_their_samples() -> None:
    plan = _plan(num_gpus=8, mesh="pipeline=2,shard=2,tensor=2", batch_size=16)
    assert (plan.layout.data_size, plan.global_batch_size, plan.micro_batch_size) == (2, 32, 16)
    assert "32 = 16 per group × 2 groups × 1 accumulation" in dict(plan.explanation)["global batch"]
    assert plan.learning_rate == pytest.approx(0.02)


def test_hybrid_workers_take_samples_of_their_own() -> None:
    plan = _plan(num_gpus=4, strategy="hybrid", batch_size=16)
    assert (plan.layout.data_size, plan.global_batch_size, plan.layout.sharer) == (4, 64, "worker")


@pytest.mark.parametrize(
    ("flags", "zero"),
    [
        ({"strategy": "zero1"}, 1),
        ({"strategy": "zero2"}, 2),
        ({"strategy": "fsdp"}, 3),
        ({"mesh": "shard=4"}, 3),
        ({"mesh": "shard=4", "zero": 2}, 2),
        ({"mesh": "replicate=4"}, 0),
        ({"strategy": "tensor"}, 0),
    ],
)
def test_what_the_axis_shard_cuts(flags: dict[str, Any], zero: int) -> None:
    assert _plan(num_gpus=4, **flags).layout.zero == zero


def test_a_mesh_of_copies_is_ddp() -> None:
    layout = _plan(num_gpus=4, mesh="replicate=4").layout
    assert (layout.strategy, layout.is_sharded) == ("ddp", False)


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ({"batch_size": 32}, 8),
        ({"batch_size": 6}, 6),
        ({"batch_size": 7}, 7),
        ({"batch_size": 13}, 1),
        ({"batch_size": 32, "micro_batches": 16}, 16),
        ({"batch_size": 32, "schedule": "interleaved"}, 8),
        ({"batch_size": 6, "schedule": "zero-bubble"}, 6),
        ({"batch_size": 32, "strategy": "naive"}, 1),
    ],
)
def test_micro_batches_of_a_pipeline_are_equal(flags: dict[str, Any], chosen: int) -> None:
    assert _plan(num_gpus=2, **{"strategy": "pipeline", **flags}).micro_batches == chosen


def test_one_worker_can_be_sharded() -> None:
    layout = _plan(num_gpus=1, strategy="fsdp", offload=True).layout
    assert (layout.is_sharded, layout.zero, layout.world_size) == (True, 3, 1)


def test_ranks_are_row_major() -> None:
    mesh = Mesh(pipeline=2, replicate=3, shard=2, tensor=2)
    coordinates = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.size)]
    assert coordinates == list(itertools.product(range(2), range(3), range(2), range(2)))
    assert tuple(mesh.coordinates(0)) == AXES
    assert mesh.size == 24


def test_parse_mesh() -> None:
    axes = parse_mesh("replicate=2, shard=4")
    assert axes == {"replicate": 2, "shard": 4}
    mesh = mesh_of(axes, "replicate=2,shard=4", 8, "as set")
    assert (mesh, str(mesh), str(Mesh())) == (Mesh(replicate=2, shard=4), "replicate=2,shard=4", "one worker")


@pytest.mark.parametrize(
    ("text", "world_size", "sentence"),
    [
        ("shard", 2, "'shard' is no axis with a number of workers"),
        ("shard=0", 2, "'shard=0' is no axis with a number of workers"),
        ("shard=x", 2, "'shard=x' is no axis with a number of workers"),
        ("chard=2", 2, "did you mean shard? choose one of: pipeline, replicate, shard, tensor"),
        ("shard=2,shard=2", 4, "it names shard twice"),
        ("shard=4,tensor=2", 6, "that is 4 × 2 = 8 and there are 6 workers (as set); set --mesh shard=3,tensor=2"),
        ("tensor=2", 6, "that is 2 and there are 6 workers (as set); set --mesh tensor=2,replicate=3, or start 2"),
        ("tensor=4", 1, "that is 4 and there is 1 worker (as set); set --mesh tensor=1, or start 4 workers"),
    ],
)
def test_an_impossible_mesh_is_refused_with_its_arithmetic(text: str, world_size: int, sentence: str) -> None:
    with pytest.raises(SettingError) as raised:
        mesh_of(parse_mesh(text), text, world_size, "as set")
    assert sentence in str(raised.value)


def test_presets_give_all_workers_to_their_axis() -> None:
    assert preset_mesh(SPECS["fsdp"], 8, 4) == Mesh(shard=8)
    assert preset_mesh(SPECS["zero1"], 3, 3) == Mesh(shard=3)
    assert preset_mesh(SPECS["hsdp"], 8, 4) == Mesh(replicate=2, shard=4)
    assert preset_mesh(SPECS["pipeline"], 2, 2) == preset_mesh(SPECS["naive"], 2, 2) == Mesh(pipeline=2)
    assert preset_mesh(SPECS["tensor"], 2, 2) == preset_mesh(SPECS["hybrid"], 2, 2) == Mesh(tensor=2)


@pytest.mark.parametrize(("world_size", "per_node"), [(4, 4), (6, 4)])
def test_hsdp_needs_equal_nodes(world_size: int, per_node: int) -> None:
    with pytest.raises(SettingError):
        preset_mesh(SPECS["hsdp"], world_size, per_node)
