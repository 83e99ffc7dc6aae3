"""A place holds together, or says what does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormo.errors import SettingError
from stormo.launch.rank_info import RankInfo, alone, derived_port

WHOLE: dict[str, Any] = {
    "launcher": "slurm",
    "rank": 5,
    "world_size": 8,
    "local_rank": 1,
    "local_size": 4,
    "node_id": 1,
    "num_nodes": 2,
    "master_addr": "n1",
    "master_port": 12345,
    "host": "n2",
}


def test_rank_0_is_main_and_one_node_is_reached_by_loopback() -> None:
    info = RankInfo(**WHOLE)
    assert not info.is_main
    assert not info.all_on_this_host
    first = RankInfo(**{**WHOLE, "rank": 0, "local_rank": 0, "node_id": 0})
    assert first.is_main
    assert alone().is_main
    assert alone().all_on_this_host


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rank": 8}, "The environment of rank 8 has a rank of 8 with a world size of 8"),
        ({"rank": -1}, "0 <= rank < 8 must hold"),
        ({"world_size": 0}, "a world size of 0"),
        ({"local_rank": 4}, "a local rank of 4"),
        ({"node_id": 2}, "a node id of 2"),
        ({"local_size": 9}, "2 nodes, 9 ranks on this one, and a world size of 8"),
        ({"num_nodes": 9}, "9 nodes, 4 ranks on this one, and a world size of 8"),
        ({"num_nodes": 1, "node_id": 0}, "one node with 4 ranks on it and a world size of 8"),
        ({"master_addr": ""}, "an empty master address"),
        ({"master_port": 80}, "master port 80 was set"),
        ({"master_port": 65536}, "within 1024 to 65535"),
    ],
)
def test_a_contradiction_is_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        RankInfo(**{**WHOLE, **change})
    assert sentence in str(caught.value)


@given(job=st.integers(0, 2**32), step=st.integers(0, 100), other_step=st.integers(0, 100), apart=st.integers(1, 200))
def test_jobs_and_steps_near_each_other_never_share_a_port(job: int, step: int, other_step: int, apart: int) -> None:
    assert 1024 <= derived_port(job, step) <= 49151
    assert derived_port(job, step) != derived_port(job + apart, other_step)


@given(job=st.integers(0, 2**32), steps=st.sets(st.integers(0, 100), min_size=2, max_size=2))
def test_two_steps_of_a_job_differ_in_their_port(job: int, steps: set[int]) -> None:
    assert len({derived_port(job, step) for step in steps}) == 2
