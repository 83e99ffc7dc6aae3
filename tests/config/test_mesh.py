"""The arithmetic of the mesh: ranks and axes, presets, and the sentence for every product that cannot be."""

from __future__ import annotations

import itertools

import pytest

from stormo.config.mesh import AXES, Mesh, mesh_of, parse_mesh, preset_mesh
from stormo.config.strategies import SPECS
from stormo.errors import SettingError


def test_every_rank_has_its_place_and_tensor_is_fastest() -> None:
    mesh = Mesh(pipeline=2, replicate=3, shard=2, tensor=2)
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.size)]
    assert places == list(itertools.product(range(2), range(3), range(2), range(2)))
    assert tuple(mesh.coordinates(0)) == AXES
    assert (mesh.size, mesh.data_size, mesh.model_size) == (24, 6, 8)


def test_a_mesh_is_read_as_it_is_said() -> None:
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
def test_a_mesh_that_cannot_be_is_answered_with_its_arithmetic(text: str, world_size: int, sentence: str) -> None:
    with pytest.raises(SettingError) as raised:
        mesh_of(parse_mesh(text), text, world_size, "as set")
    assert sentence in str(raised.value)


def test_presets_give_all_workers_to_their_axis() -> None:
    assert preset_mesh(SPECS["fsdp"], 8, 4) == Mesh(shard=8)
    assert preset_mesh(SPECS["zero1"], 3, 3) == Mesh(shard=3)
    assert preset_mesh(SPECS["hsdp"], 8, 4) == Mesh(replicate=2, shard=4)
    assert preset_mesh(SPECS["pipeline"], 2, 2) == preset_mesh(SPECS["naive"], 2, 2) == Mesh(pipeline=2)
    assert preset_mesh(SPECS["tensor"], 2, 2) == preset_mesh(SPECS["hybrid"], 2, 2) == Mesh(tensor=2)


@pytest.mark.parametrize(
    ("world_size", "per_node", "why"), [(4, 4, "one node, of 4 workers"), (6, 4, "6 workers do not divide into nodes")]
)
def test_hsdp_needs_equal_nodes(world_size: int, per_node: int, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        preset_mesh(SPECS["hsdp"], world_size, per_node)
