"""Who a task of srun is, and what its job was given, from recorded environments."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormo.errors import SettingError
from stormo.launch.environments import slurm
from stormo.launch.environments.detect import detect
from stormo.launch.environments.slurm import check_without_srun, expand_hosts, expand_tasks, gpus_on_node, hints
from tests.launch.slurm_environments import COMMANDS, tasks_of

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


def test_a_task_of_a_step_knows_its_rank() -> None:
    assert slurm.detect(STEP)
    info = slurm.rank_info(STEP)
    assert (info.rank, info.world_size) == (5, 7)
    assert (info.local_rank, info.local_size) == (1, 2)
    assert (info.node_id, info.num_nodes) == (2, 4)
    assert (info.master_addr, info.host) == ("gpu007", "gpu009")
    last = slurm.rank_info(
        {**STEP, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURMD_NODENAME": "login1"}
    )
    assert last.local_size == 1


def test_one_node_meets_on_loopback() -> None:
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_LOCALID": "5"}
    assert slurm.rank_info({**STEP, **one}).master_addr == "127.0.0.1"


def test_what_the_user_exported_wins() -> None:
    info = slurm.rank_info({**STEP, "MASTER_ADDR": "gpu007-ib0", "MASTER_PORT": "20000"})
    assert (info.master_addr, info.master_port) == ("gpu007-ib0", 20000)


def test_another_job_or_step_gets_another_port() -> None:
    changes: list[dict[str, str]] = [{}, {"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "4"}]
    ports = {slurm.rank_info({**STEP, **change}).master_port for change in changes}
    assert len(ports) == 3
    assert all(1024 <= port <= 49151 for port in ports)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID='x' was set"),
        ({"SLURM_NODEID": "4"}, "it lists 4 nodes and this is node 4"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is empty"),
        ({"SLURM_PROCID": "7"}, "a rank of 7 with a world size of 7"),
    ],
)
def test_a_contradiction_in_the_variables_is_named(change: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        slurm.rank_info({**STEP, **change})
    assert sentence in str(caught.value)


NOTHING_SET: dict[str, int | None] = {"num_gpus": None, "num_nodes": None}
FORGOTTEN = {
    "sbatch -n4 -N2 --gpus-per-node=4": "4 tasks on 2 nodes",
    "sbatch -N2": "2 tasks on 2 nodes",
    "sbatch -N1 -n2 : -N1 -n1": "3 tasks on 2 nodes",
}


@pytest.mark.parametrize("command", FORGOTTEN)
def test_a_batch_script_that_forgets_srun_is_told_so(command: str) -> None:
    (environ,) = tasks_of(command)
    assert detect(environ) is None
    with pytest.raises(SettingError) as caught:
        check_without_srun(environ, **NOTHING_SET)
    assert str(caught.value) == (
        "stormo was started in the body of a Slurm batch script without srun, but the job asks for "
        f"{FORGOTTEN[command]} and only this one process would train; write srun in front of it, or set --num-gpus "
        "for the workers that it starts on this node."
    )
    # Newer releases number the step of the script too.
    with pytest.raises(SettingError, match="without srun"):
        check_without_srun({**environ, "SLURM_STEP_ID": "4294967291"}, **NOTHING_SET)
    assert check_without_srun(environ, num_gpus=4, num_nodes=None) is None


def test_a_shell_of_a_job_of_several_tasks_is_given_a_hint() -> None:
    (environ,) = tasks_of("salloc -n4 -N2")
    hint = "this Slurm job has 4 tasks on 2 nodes, and this is one process; "
    assert check_without_srun(environ, **NOTHING_SET) == hint + "srun in front of the command starts all of them"
    interactive = {**environ, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}
    assert (check_without_srun(interactive, **NOTHING_SET) or "").startswith(hint)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        *(tasks_of("sbatch -n1 -N1")),
        *(tasks_of("srun --pty -N1 -n1 --gpus=2")),
        *(tasks_of("salloc -n4 -N2 srun --pty -n1 -N1")),
        *(tasks_of("sbatch -N2 -n4, srun -n1 -N1")),
    ],
)
def test_one_process_where_one_was_asked_for_needs_no_word(environ: dict[str, str]) -> None:
    assert detect(environ) is None
    assert check_without_srun(environ, **NOTHING_SET) is None


def test_more_nodes_than_the_job_has_are_refused() -> None:
    (environ,) = tasks_of("sbatch -N2")
    with pytest.raises(SettingError) as caught:
        check_without_srun(environ, num_gpus=4, num_nodes=4)
    assert str(caught.value) == (
        "--num-nodes 4 was set, but this Slurm job has 2 nodes; set --num-nodes 2, or ask Slurm for --nodes 4."
    )
    assert check_without_srun(environ, num_gpus=4, num_nodes=2) is None


HINTS: dict[str, list[str]] = {
    "srun -n3 -N2": ["srun put 2, 1 tasks on the 2 nodes"],
    "srun -n8 -N2": ["srun put 7, 1 tasks on the 2 nodes; --ntasks-per-node=4 puts the same number on each"],
    "srun -N2 --ntasks-per-node=4": [],
    "salloc -N1 -n2 : -N1 -n1 srun": [
        "srun started tasks on 1 node of the 2 of this heterogeneous job; --het-group=0,1 takes all"
    ],
    "salloc -w n2 -n2 : -w n1 -n1 srun --het-group=0,1": ["srun put 1, 2 tasks on the 2 nodes"],
    "srun -N1 -n4 --gpus-per-node=4": [],
}


@pytest.mark.parametrize("command", HINTS)
def test_a_step_that_is_hardly_as_it_was_meant_is_told_so(command: str) -> None:
    environ = tasks_of(command)[0]
    assert hints(environ, slurm.rank_info(environ), pid=1) == HINTS[command]


def test_a_shell_with_the_terminal_of_several_tasks_is_told_for_whom_it_waits() -> None:
    environ = {**tasks_of("srun -N1 -n4 --gpus-per-node=4")[0], "SLURM_PTY_PORT": "40000", "SLURM_TASK_PID": "17"}
    info = slurm.rank_info(environ)
    assert hints(environ, info, pid=17) == []  # srun --pty stormo train
    (hint,) = hints(environ, info, pid=18)
    assert hint.startswith(
        "srun --pty started 4 tasks, of which only this one has a terminal, and waits for the others"
    )


def _launches(command: str) -> list[list[dict[str, str]]]:
    """The tasks of every step that a command has started."""
    steps: dict[Any, list[dict[str, str]]] = {}
    for environ in tasks_of(command):
        steps.setdefault((environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID")), []).append(environ)
    return list(steps.values())


STEPS = [command for command in COMMANDS if slurm.detect(tasks_of(command)[0]) and "arbitrary" not in command]


@pytest.mark.parametrize("command", STEPS)
def test_every_task_of_every_kind_of_step_knows_its_rank(command: str) -> None:
    ports = []
    for tasks in _launches(command):
        infos = [slurm.rank_info(task) for task in tasks]
        assert [info.rank for info in infos] == list(range(len(tasks)))
        hosts = [task["SLURMD_NODENAME"] for task in tasks]
        for info, host in zip(infos, hosts, strict=True):
            on_host = [other for other, name in zip(infos, hosts, strict=True) if name == host]
            assert info.world_size == len(tasks)
            assert (info.host, info.local_size) == (host, len(on_host))
            assert sorted(other.local_rank for other in on_host) == list(range(len(on_host)))
            assert {other.node_id for other in on_host} == {info.node_id}
            assert info.num_nodes == len(set(hosts))
            assert info.master_addr == ("127.0.0.1" if info.num_nodes == 1 else hosts[0])
        ports.append({info.master_port for info in infos})
    assert all(len(port) == 1 for port in ports)
    assert len(set.union(*ports)) == len(ports)  # steps and array tasks at one time on one node


def test_tasks_that_were_placed_by_hand_must_be_told_where_the_first_one_is() -> None:
    tasks = tasks_of("srun -m arbitrary -w n2,n1,n1 -n3")
    with pytest.raises(SettingError, match=r"--distribution=arbitrary.*set --master-addr to the name of the host"):
        slurm.rank_info(tasks[0])
    infos = [slurm.rank_info({**task, "MASTER_ADDR": "n2"}) for task in tasks]
    assert [(info.rank, info.local_rank, info.local_size) for info in infos] == [(0, 0, 1), (1, 0, 2), (2, 1, 2)]


def test_a_list_of_nodes_that_is_not_in_their_order_is_not_trusted() -> None:
    environ = tasks_of("srun -N1 -n1 : -N1 -n2")[0]
    with pytest.raises(SettingError, match="made host n2 node 0 and lists the nodes as n1, n2"):
        slurm.rank_info({**environ, "SLURMD_NODENAME": "n2"})


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("srun -N2 --ntasks-per-node=2 --gpus-per-task=1", 2),
        ("srun -N1 -n4 --gpus-per-node=2", 2),
        ("srun -N1 -n4 --gpus-per-node=4 --gpu-bind=single:1", 4),
        ("srun -n3 -N2", None),
    ],
)
def test_slurm_counts_the_gpus_of_all_tasks_of_a_node(command: str, count: int | None) -> None:
    assert {gpus_on_node(task) for task in tasks_of(command)} == {count}
