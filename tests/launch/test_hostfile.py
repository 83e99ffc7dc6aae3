"""Lists of hosts, in every form that people have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormo.errors import SettingError
from stormo.launch.hostfile import ListedHost, all_here, hosts_of_job, parse_hosts, read_hostfile, slots_of
from stormo.launch.place import host_name

OPEN_MPI = "# nodes\nnode1 slots=4\n\nnode2\tslots = 4 max_slots=8  # the second\n"
MPICH = "node1:4\nnode2:4\n"
PBS = "node1\nnode1\nnode1\nnode1\nnode2\nnode2\nnode2\nnode2\n"


def hosts(**slots: int | None) -> tuple[ListedHost, ...]:
    return tuple(ListedHost(name=name, slots=count) for name, count in slots.items())


@pytest.mark.parametrize("text", [OPEN_MPI, MPICH, PBS, "\ufeffnode1:4\r\nnode2:4\r\n"])
def test_the_files_of_open_mpi_mpich_and_pbs_are_read_alike(text: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    assert read_hostfile(str(file)) == hosts(node1=4, node2=4)
    assert hosts_of_job({"PBS_NODEFILE": str(file)}) == hosts(node1=4, node2=4)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node1,node2", hosts(node1=None, node2=None)),
        ("n[1-3]", hosts(n1=None, n2=None, n3=None)),
        ("n[1-2]:4", hosts(n1=4, n2=4)),
        ("10.0.0.1:2,10.0.0.2", (ListedHost(name="10.0.0.1", slots=2), ListedHost(name="10.0.0.2"))),
        ("fd00::1", (ListedHost(name="fd00::1"),)),
        ("me@gpu-1.site.org", (ListedHost(name="me@gpu-1.site.org"),)),
    ],
)
def test_a_flag_names_hosts_in_long_and_in_short(text: str, found: tuple[ListedHost, ...]) -> None:
    assert parse_hosts(text) == found


def test_the_user_who_logs_in_is_no_part_of_the_address() -> None:
    assert parse_hosts("me@gpu1")[0].address == "gpu1"


def test_the_nodes_of_a_slurm_job_are_known() -> None:
    assert hosts_of_job({"SLURM_JOB_NODELIST": "n[1-2]"}) == hosts(n1=None, n2=None)
    groups = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_1": "g1"}
    of_first = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_HET_SIZE": "2"}
    assert hosts_of_job({**of_first, **groups}) == hosts(n1=None, n2=None, g1=None)
    assert hosts_of_job({}) == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("node1\nnode2 slot=4\n", "'node2 slot=4' is in line 2 of --hostfile {}, but it does not name a host; write"),
        ("node1 slots=four\n", "'node1 slots=four' is in line 1 of --hostfile {}, but it does not name a host; write"),
        ("-oProxyCommand=x\n", "'-oProxyCommand=x' is in line 1 of --hostfile {}, but it does not name a host; write"),
        ("node1:0\n", "'node1:0' is in line 1 of --hostfile {}, but a host needs at least one slot; leave"),
        ("# nothing\n", "--hostfile {} was set, but it names no host; name one host a line"),
    ],
)
def test_a_broken_line_is_named(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(SettingError) as caught:
        read_hostfile(str(file))
    assert str(caught.value).startswith(sentence.format(file))


def test_what_is_no_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--hostfile .*none was set, but it cannot be read \(No such file"):
        read_hostfile(str(tmp_path / "none"))
    with pytest.raises(SettingError, match=r"--hosts n\[1-3 was set, but its brackets do not match; set something"):
        parse_hosts("n[1-3")
    with pytest.raises(SettingError, match=r"--hosts a,,b was set, but a name in it is empty"):
        parse_hosts("a,,b")
    with pytest.raises(SettingError, match=r"but the range '3-1' runs backwards: 1 is less than 3; set something"):
        parse_hosts("n[3-1]")
    why = r"alone names 99999999 - 1 \+ 1 = 99999999 hosts, and 1000000 are the most; set something like --hosts node1"
    with pytest.raises(SettingError, match=rf"--hosts a\[1-99999999\] was set, but the range '1-99999999' {why}"):
        parse_hosts("a[1-99999999]")


def test_workers_of_a_host_are_as_set_or_its_slots() -> None:
    assert slots_of(hosts(a=4, b=4), None) == 4
    assert slots_of(hosts(a=4, b=2), 2) == 2
    assert slots_of(hosts(a=None, b=None), None) is None
    with pytest.raises(SettingError) as caught:
        slots_of(hosts(a=4, b=2), None)
    assert str(caught.value) == (
        "the hosts a and b are listed with slots=4 and slots=2, but every host starts equally many workers; "
        "set --num-gpus to what each has room for, or list the same slots."
    )
    with pytest.raises(SettingError, match="--num-gpus 8 was set, but host b is listed with 4 slots; set --num-gpus 4"):
        slots_of(hosts(a=8, b=4), 8)


def test_this_host_is_known_by_its_names_and_addresses() -> None:
    own = host_name()
    for here in (own, f"{own}.site.org", "127.0.0.1", "localhost"):
        assert all_here(parse_hosts(here))
    assert not all_here(parse_hosts("nowhere1"))
    assert not all_here(parse_hosts("192.0.2.7"))
