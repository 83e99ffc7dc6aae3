"""Lists of hosts, and one command started on all of them."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from stormo.cli import main
from stormo.config.options import flat_settings
from stormo.config.schema import ResolvedBatch
from stormo.config.toml import to_toml
from stormo.errors import SettingError
from stormo.launch import hosts
from stormo.launch.hosts import ListedHost, all_here, hosts_of_job, parse_hosts, read_hostfile, slots_of
from stormo.launch.rank_info import host_name
from stormo.training.settings import read_settings

OPEN_MPI = "# nodes\nnode1 slots=4\n\nnode2\tslots = 4 max_slots=8  # the second\n"
MPICH = "node1:4\nnode2:4\n"
PBS = "node1\nnode1\nnode1\nnode1\nnode2\nnode2\nnode2\nnode2\n"


def listed(**slots: int | None) -> tuple[ListedHost, ...]:
    return tuple(ListedHost(name=name, slots=count) for name, count in slots.items())


@pytest.mark.parametrize("text", [OPEN_MPI, MPICH, PBS, "\ufeffnode1:4\r\nnode2:4\r\n"])
def test_the_files_of_open_mpi_mpich_and_pbs_are_read_alike(text: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    assert read_hostfile(str(file)) == listed(node1=4, node2=4)
    assert hosts_of_job({"PBS_NODEFILE": str(file)}) == listed(node1=4, node2=4)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node1,node2", listed(node1=None, node2=None)),
        ("n[1-3]", listed(n1=None, n2=None, n3=None)),
        ("n[1-2]:4", listed(n1=4, n2=4)),
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
    assert hosts_of_job({"SLURM_JOB_NODELIST": "n[1-2]"}) == listed(n1=None, n2=None)
    groups = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_1": "g1"}
    of_first = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_HET_SIZE": "2"}
    assert hosts_of_job({**of_first, **groups}) == listed(n1=None, n2=None, g1=None)
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
    assert slots_of(listed(a=4, b=4), None) == 4
    assert slots_of(listed(a=4, b=2), 2) == 2
    assert slots_of(listed(a=None, b=None), None) is None
    with pytest.raises(SettingError) as caught:
        slots_of(listed(a=4, b=2), None)
    assert str(caught.value) == (
        "the hosts a and b are listed with slots=4 and slots=2, but every host starts equally many workers; "
        "set --num-gpus to what each has room for, or list the same slots."
    )
    with pytest.raises(SettingError, match="--num-gpus 8 was set, but host b is listed with 4 slots; set --num-gpus 4"):
        slots_of(listed(a=8, b=4), 8)


def test_this_host_is_known_by_its_names_and_addresses() -> None:
    own = host_name()
    for here in (own, f"{own}.site.org", "127.0.0.1", "localhost"):
        assert all_here(parse_hosts(here))
    assert not all_here(parse_hosts("nowhere1"))
    assert not all_here(parse_hosts("192.0.2.7"))


RUN = [sys.executable, "-P", "-m", "stormo"]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI", "PMI", "STORMO_", *hosts._PASSED_ON, *hosts._PASSED_ON_WHOLE)):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "INFO x")
    monkeypatch.chdir(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main([*arguments, "--print-commands"]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err.removeprefix("stormo: ").strip()


def test_ssh_starts_the_same_command_on_every_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = printed(
        *(capsys, "train", "--launcher", "ssh", "--hosts=n[1-2]", "--num_gpus", "4", "--seed", "7"),
        *("--master-port=20000", "--run-name", "it's"),
    )
    assert [lines[0], lines[2]] == ["# on n1", "# on n2"]
    for node_id, line in enumerate((lines[1], lines[3])):
        folder, _, command = line.partition(" && ")
        assert shlex.split(folder) == ["cd", str(tmp_path)]
        assert shlex.split(command) == [
            *("env", "NCCL_DEBUG=INFO x", *RUN, "train", "--seed", "7", "--run-name", "it's", "--num-gpus", "4"),
            *("--master-addr", "n1", "--master-port", "20000", "--num-nodes", "2", "--node-id", str(node_id)),
        ]


def test_more_variables_go_along_where_the_user_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"STORMO_PASS": "MINE, NONE", "MINE": "1", "OTHER": "2", "CUDA_VISIBLE_DEVICES": "3", "CUDA_HOME": "/c"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)

    def passed_on() -> list[str]:
        words = shlex.split(printed(capsys, "train", "--launcher", "ssh", "--hosts", "n1")[1])
        return words[words.index("env") + 1 : words.index(sys.executable)]

    assert passed_on() == ["CUDA_HOME=/c", "MINE=1", "NCCL_DEBUG=INFO x"]
    monkeypatch.setenv("STORMO_PASS", "CUDA_VISIBLE_DEVICES")
    assert passed_on() == ["CUDA_HOME=/c", "CUDA_VISIBLE_DEVICES=3", "NCCL_DEBUG=INFO x"]


def test_a_script_keeps_its_own_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "my.py").touch()
    arguments = ["run", "my.py", "--launcher", "ssh", "--hosts", "me@n1,n2", "--print-commands", "--", "--hosts", "own"]
    assert main(arguments) == 0
    line = capsys.readouterr().out.splitlines()[3]
    words = shlex.split(line)
    assert words[words.index("run") : words.index("run") + 4] == ["run", "my.py", "--master-addr", "n1"]
    assert words[-5:] == ["--node-id", "1", "--", "--hosts", "own"]


def test_a_file_that_names_the_launcher_does_not_start_it_again_on_the_hosts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "my.toml").write_text('[workers]\nlauncher = "ssh"\nhosts = "n1,n2"\n')
    words = shlex.split(printed(capsys, "train", "--config", "my.toml")[1])
    at = words.index("--launcher")
    assert words[at + 1] == "auto"
    config, _ = read_settings(["--config", "my.toml", "--launcher", "auto"])
    assert main(["train", "--config", "my.toml", "--launcher", "auto", "--dry-run"]) == 0
    known = {"launcher", "hosts", "hostfile", "print_commands"}
    assert not known & set(flat_settings(config))
    text = to_toml(config, ResolvedBatch(global_batch_size=1, learning_rate=1.0, warmup_start=1.0))
    assert not any(line.startswith(tuple(known)) for line in text.splitlines())


def test_a_dry_run_counts_the_hosts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1 slots=3\nn2 slots=3\n")
    assert main(["train", "--launcher", "ssh", "--hostfile", "hosts", "--device", "cpu", "--dry-run"]) == 0
    assert "\nworkers        6 = 2 nodes × 3 CPU processes (as set; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "start", "instead"),
    [
        ("--hosts n1", "--hosts was set without --launcher,", "set --launcher ssh."),
        ("--launcher ssh", "--launcher ssh was set, but no host was named;", "set --hosts node1,node2"),
        ("--launcher ssh --hosts n1 --hostfile f", "--hosts and --hostfile were set,", "leave one of them out."),
        (
            "--launcher ssh --hosts n1,n2 --num-nodes 3",
            "--num-nodes 3 was set, but 2 hosts are named;",
            "leave it out.",
        ),
        ("--launcher ssh --hosts localhost,n2", "the first of 2 hosts was named localhost,", "or set --master-addr."),
        ("--launcher ssh --hosts n1,n2 --node-id 1 --num-nodes 2", "--node-id 1 was set with", "leave it out."),
        ("--launcher ssh --hosts n1,n2 --max-restarts 2", "--max-restarts 2 was set without --run-name,", "--run-name"),
        ("--launcher mpi --hosts n1,n2", "--launcher 'mpi' was asked for, but", "choose one of: auto, ssh."),
    ],
)
def test_what_contradicts_a_launcher_is_refused(
    arguments: str, start: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(capsys, "train", *arguments.split())
    assert sentence.startswith(start)
    assert instead in sentence


def test_a_rank_is_not_launched_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert refused(capsys, "train", "--launcher", "ssh", "--hosts", "n1,n2") == (
        "--launcher ssh was set, but mpirun has started this process already; "
        "drop --launcher, or type the command without mpirun."
    )
