"""Slurm's short forms, and who a task of an srun step is."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormo.errors import SettingError
from stormo.launch.environments import slurm
from stormo.launch.environments.slurm import expand_hosts, expand_tasks

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "gpu[007-009],login1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_TASKS_PER_NODE": "8(x4)",  # of the allocation
    "SLURM_NNODES": "4",
    "SLURMD_NODENAME": "gpu009",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-3,07-09],gpu5-[1-2]a", ["n1", "n2", "n3", "n07", "n08", "n09", "gpu5-1a", "gpu5-2a"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[0-1]c[0-1]", ["r0c0", "r0c1", "r1c0", "r1c1"]),
        ("n[5]", ["n5"]),
        ("n[98-101]", ["n98", "n99", "n100", "n101"]),
        ("", []),
    ],
)
def test_host_lists_expand_in_order(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text", ["n[1-3", "n1-3]", "n[[1-3]]", "n[a-b]", "n[3-1]", "n[]", "n[1-]", "a,,b", ",a", "n[1-99999999]"]
)
def test_a_broken_host_list_is_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(SettingError, match="--master-addr"):
        expand_hosts(text)


numbers = st.lists(st.tuples(st.integers(0, 120), st.integers(1, 4)), min_size=1, max_size=8)


def compress(prefix: str, values: list[tuple[int, int]], suffix: str) -> str:
    """Slurm's own way: consecutive numbers of one width become a range."""
    parts = []
    for _, run in groupby(enumerate(values), key=lambda item: (item[1][0] - item[0], item[1][1])):
        members = [f"{number:0{width}d}" for _, (number, width) in run]
        parts.append(members[0] if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return f"{prefix}[{','.join(parts)}]{suffix}"


@settings(deadline=None)  # a busy machine
@given(
    groups=st.lists(st.tuples(st.sampled_from(["n", "gpu-", "r2c"]), numbers, st.sampled_from(["", "a", "-ib"]))),
)
def test_compressing_and_expanding_gives_the_names_back(
    groups: list[tuple[str, list[tuple[int, int]], str]],
) -> None:
    names = [f"{prefix}{number:0{width}d}{suffix}" for prefix, values, suffix in groups for number, width in values]
    text = ",".join(compress(prefix, values, suffix) for prefix, values, suffix in groups)
    assert list(expand_hosts(text)) == names


@given(counts=st.lists(st.integers(1, 16), min_size=1, max_size=50))
def test_tasks_per_node_come_back(counts: list[int]) -> None:
    runs = [(count, len(list(group))) for count, group in groupby(counts)]
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert list(expand_tasks(text)) == counts


@pytest.mark.parametrize("text", ["", "2(x3", "a", "2(x)", "2,,1", "2(x99999999)"])
def test_broken_tasks_per_node_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="does not read like"):
        expand_tasks(text)


def test_a_task_of_a_step_knows_its_place() -> None:
    assert slurm.detect(STEP)
    place = slurm.place(STEP)
    assert (place.rank, place.world_size) == (5, 7)
    assert (place.local_rank, place.local_size) == (1, 2)
    assert (place.node_id, place.num_nodes) == (2, 4)
    assert (place.master_addr, place.host) == ("gpu007", "gpu009")
    last = slurm.place(
        {**STEP, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURMD_NODENAME": "login1"}
    )
    assert last.local_size == 1


def test_one_node_meets_on_loopback() -> None:
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_LOCALID": "5"}
    assert slurm.place({**STEP, **one}).master_addr == "127.0.0.1"


def test_what_the_user_exported_wins() -> None:
    place = slurm.place({**STEP, "MASTER_ADDR": "gpu007-ib0", "MASTER_PORT": "20000"})
    assert (place.master_addr, place.master_port) == ("gpu007-ib0", 20000)


def test_another_job_or_step_gets_another_port() -> None:
    changes: list[dict[str, str]] = [{}, {"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "4"}]
    ports = {slurm.place({**STEP, **change}).master_port for change in changes}
    assert len(ports) == 3
    assert all(1024 <= port <= 49151 for port in ports)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID='x' was set"),
        ({"SLURM_NODEID": "4"}, "it lists 4 nodes and this is node 4"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is empty"),
        ({"SLURM_PROCID": "7"}, "rank 7 with a world size of 7"),
    ],
)
def test_a_contradiction_in_the_variables_is_named(change: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        slurm.place({**STEP, **change})
    assert sentence in str(caught.value)
