"""What the doctor says of limits, the clock and schedulers, from machines that a test describes."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stormo.doctor import clock, limits, schedulers
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine
from tests.doctor.test_network import write

FREE = resource.RLIM_INFINITY
GB = 10**9


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(one.check, one.level) for one in findings if one.level != "ok"]


def look(
    root: Path,
    shared_bytes: int = 64 * GB,
    cores: int = 8,
    few: dict[int, tuple[int, int]] | None = None,
    **environ: str,
) -> list[Finding]:
    memory = {"MemTotal": 100 * GB, "MemAvailable": 90 * GB}
    if not (root / "proc/meminfo").exists():
        write(root, {"proc/meminfo": "\n".join(f"{name}: {value // 1024} kB" for name, value in memory.items())})
    machine = Machine(
        root=root,
        environ=environ,
        limit=lambda which: (few or {}).get(which, (FREE, FREE)),
        statvfs=lambda _: SimpleNamespace(f_blocks=shared_bytes, f_bavail=shared_bytes, f_frsize=1),  # type: ignore[arg-type, return-value]
        cores=lambda: cores,
    )
    return list(limits.check(machine))


def test_a_machine_with_room(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert not bad(found)
    assert "90 GB of 100 GB memory available" in [one.text for one in found]


@pytest.mark.parametrize(
    ("few", "expected", "words"),
    [
        ({resource.RLIMIT_NOFILE: (256, 4096)}, ("open-files", "warning"), "ulimit -n 4096"),
        ({resource.RLIMIT_NOFILE: (1024, 2048)}, ("open-files", "note"), "limits.conf"),
        ({resource.RLIMIT_NPROC: (500, 500)}, ("processes", "warning"), "ulimit -u"),
        ({resource.RLIMIT_AS: (10**9, FREE)}, ("address-space", "warning"), "ulimit -v unlimited"),
        ({resource.RLIMIT_FSIZE: (10**9, FREE)}, ("file-size", "warning"), "ulimit -f unlimited"),
    ],
)
def test_limits_of_a_process(
    tmp_path: Path, few: dict[int, tuple[int, int]], expected: tuple[str, str], words: str
) -> None:
    found = look(tmp_path, few=few)
    assert bad(found) == [expected]
    assert any(words in one.mend for one in found)


def test_locked_memory_matters_to_infiniband(tmp_path: Path) -> None:
    few = {resource.RLIMIT_MEMLOCK: (65536, 65536)}
    assert not bad(look(tmp_path, few=few))
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert bad(look(tmp_path, few=few)) == [("locked-memory", "error")]


def test_shared_memory(tmp_path: Path) -> None:
    found = look(tmp_path, shared_bytes=64 << 20)
    assert bad(found) == [("shared-memory", "warning")]
    assert any("--shm-size" in one.mend for one in found)

    def absent(_: Path) -> Any:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    found = list(limits.check(Machine(root=tmp_path, environ={}, limit=lambda _: (FREE, FREE), statvfs=absent)))
    assert ("shared-memory", "error") in bad(found)


@pytest.mark.parametrize(
    ("files", "expected", "words"),
    [
        (
            {"proc/self/cgroup": "0::/job/step", "sys/fs/cgroup/job/memory.max": 16 * GB},
            *(("memory", "note"), "16 GB of the machine's 100 GB"),
        ),
        (
            {"proc/self/cgroup": "4:memory:/x", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": 8 * GB},
            *(("memory", "note"), "8 GB of"),
        ),
        (
            {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"},
            *(("cores", "warning"), "but a quota of 2"),
        ),
        (
            {
                "proc/self/cgroup": "1:cpu,cpuacct:/",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 150000,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
            },
            *(("cores", "warning"), "but a quota of 1.5"),
        ),
        (
            {"proc/self/cgroup": "0::/", "sys/fs/cgroup/pids.max": 100},
            *(("processes", "warning"), "100 processes and threads"),
        ),
        ({"proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 5 kB"}, ("memory", "warning"), "of 102 kB"),
        (
            {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 90 kB\nSwapTotal: 10 kB\nSwapFree: 1 kB"},
            *(("swap", "warning"), "swap is in use"),
        ),
        ({"proc/sys/vm/overcommit_memory": 2}, ("overcommit", "warning"), "vm.overcommit_memory=2"),
        (
            {"sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "powersave"},
            *(("governor", "warning"), "lowest clock"),
        ),
    ],
)
def test_limits_of_the_machine(tmp_path: Path, files: dict[str, object], expected: tuple[str, str], words: str) -> None:
    write(tmp_path, files)
    found = look(tmp_path)
    assert bad(found) == [expected]
    assert any(words in one.text for one in found if one.level != "ok")


def test_powersave_of_intel_and_no_limit_of_old_cgroups_are_fine(tmp_path: Path) -> None:
    at = "sys/devices/system/cpu/cpufreq/policy0"
    write(tmp_path, {f"{at}/scaling_governor": "powersave", f"{at}/scaling_driver": "intel_pstate"})
    write(tmp_path, {"proc/self/cgroup": "4:memory:/\n0::/"})
    write(
        tmp_path,
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712, "sys/fs/cgroup/cpu.max": "max 100000"},
    )
    assert not bad(look(tmp_path))


def test_more_threads_than_cores(tmp_path: Path) -> None:
    assert bad(look(tmp_path, OMP_NUM_THREADS="16")) == [("cores", "warning")]
    assert not bad(look(tmp_path, OMP_NUM_THREADS="8"))


@pytest.mark.parametrize(
    ("known", "now_s", "expected"),
    [
        ((True, 400), 1.8e9, []),
        ((True, 900_000), 1.8e9, [("clock-sync", "warning")]),
        ((False, 16_000_000), 1.8e9, [("clock-sync", "warning")]),
        (None, 1.8e9, [("clock-sync", "note")]),
        ((True, 400), 0.0, [("clock-date", "error")]),
    ],
)
def test_the_clock(tmp_path: Path, known: tuple[bool, int] | None, now_s: float, expected: list[Any]) -> None:
    found = list(clock.check(Machine(root=tmp_path), lambda: known, lambda: now_s))
    assert bad(found) == expected


def test_the_kernel_tells_of_its_clock_and_a_slow_source_is_named(tmp_path: Path) -> None:
    known = clock.ask_kernel()
    assert known is None or (isinstance(known[0], bool) and known[1] >= 0)
    write(tmp_path, {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"})
    assert bad(list(clock.check(Machine(root=tmp_path), lambda: (True, 1), lambda: 1.8e9))) == [
        ("clock-source", "note")
    ]


@pytest.fixture
def programs(tmp_path: Path) -> Callable[..., Machine]:
    """A machine whose only programs are shell scripts."""

    def make(scripts: dict[str, str], **environ: str) -> Machine:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        return Machine(root=tmp_path, environ={"PATH": str(folder)} | environ)

    return make


SINFO = 'if [ "$1" = --version ]; then echo "slurm 24.11.5"; else {}; fi'


def test_schedulers_that_answer(programs: Callable[..., Machine]) -> None:
    scripts = {
        "sinfo": SINFO.format("echo '10 idle gpu:h200:8'; echo '2 down* gpu:h200:8'"),
        "mpirun": "echo 'mpirun (Open MPI) 5.0.6'; echo",
    }
    found = list(schedulers.check(programs(scripts, SLURM_JOB_ID="77", SLURM_PROCID="0")))
    assert [one.text for one in found if one.level == "ok"] == [
        "Slurm 24.11.5 answers; inside job 77: 12 nodes (10 idle, 2 down)",
        "mpirun (Open MPI) 5.0.6",
    ]
    assert bad(found) == [("slurm", "note")]  # the script of sbatch, without srun


def test_schedulers_that_do_not(programs: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1"
    found = list(schedulers.check(programs({"sinfo": SINFO.format(failing), "mpirun": "exit 127"})))
    assert bad(found) == [("slurm", "warning"), ("mpi", "warning")]
    assert found[0].text.startswith("Slurm 24.11.5 is installed, but does not answer: slurm_load_partitions")
    monkeypatch.setattr(schedulers, "_LIMIT_S", 0.2)
    found = list(schedulers.check(programs({"sinfo": "exec /bin/sleep 60", "mpirun": "exit 127"})))
    assert "sinfo did not answer within 0.2 s" in found[0].text


def test_launchers_and_containers(programs: Callable[..., Machine], tmp_path: Path) -> None:
    def texts(**environ: str) -> list[str]:
        return [one.text for one in schedulers.check(programs({}, **environ))]

    assert texts() == ["no scheduler and no mpirun: start the same command on each node with --num-nodes and --node-id"]
    assert "inside job 5 of PBS, whose commands are not here: as usual in a container" in texts(PBS_JOBID="5")
    assert "inside a pod of Kubernetes" in texts(KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert "inside a job of torchrun: rank 1 of 2" in texts(TORCHELASTIC_RUN_ID="a", RANK="1", WORLD_SIZE="2")
    assert "RANK is set, as if a launcher had started this process" in texts(RANK="1")
    assert "inside a container of Apptainer" in texts(APPTAINER_CONTAINER="/x.sif")
    (tmp_path / ".dockerenv").touch()
    assert "inside a container of Docker" in texts()
