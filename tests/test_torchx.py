"""The component of TorchX: what it asks of a scheduler, and what every node then runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stormo.errors import SettingError

pytest.importorskip("torchx", reason="needs TorchX: pip install 'stormo[torchx]'")
from torchx.runner import get_runner
from torchx.specs import Role, macros
from torchx.specs.finder import get_components

from stormo.torchx import train

ODD = ("--task.label", "it's $HOME, ${app_id} and `date`", "--run.x=a b")


def test_the_component_passes_the_check_of_torchx_and_hides_none_of_its_own() -> None:
    components = get_components()
    assert components["stormo.train"].validation_errors == []
    assert "dist.ddp" in components
    assert "utils.echo" in components


def test_what_is_asked_of_a_scheduler() -> None:
    mounts = ["type=bind", "src=/data", "dst=/data", "readonly"]
    app = train(
        "--", "--epochs", "3", task="t.py", nodes=2, gpus=4, cpus=32, memory_mb=64_000, env={"A": "b"}, max_retries=3,
        image="registry/stormo:1", mounts=mounts, port=1234,
    )  # fmt: skip
    (role,) = app.roles
    script = (
        "unset SLURM_PROCID; export TERM=dumb; exec stormo train t.py --run-name torchx-${app_id} --resume "
        "--num-gpus 4 --num-nodes 2 --node-id ${replica_id} --master-addr "
        "\"$${VC_STORMO_0_HOSTS:-$${${rank0_env}:-$$(hostname -i | cut -d' ' -f1)}}\" --master-port 1234 --epochs 3"
    )
    assert (role.entrypoint, role.args) == ("bash", ["-c", script])
    assert (role.num_replicas, role.max_retries, role.image, role.env) == (2, 3, "registry/stormo:1", {"A": "b"})
    assert (role.resource.gpu, role.resource.cpu, role.resource.memMB) == (4, 32, 64_000)
    (mount,) = role.mounts
    assert (mount.src_path, mount.dst_path, mount.read_only) == ("/data", "/data", True)
    alone = train(task="t.py", workers=2).roles[0].args[1]
    assert alone.endswith("exec stormo train t.py --run-name torchx-${app_id} --resume --num-gpus 2")
    assert train(host="aws_p4d.24xlarge").roles[0].args[1].endswith(" --num-gpus 8")


def test_a_flag_that_the_component_sets_is_refused() -> None:
    for flag in ("--num_nodes", "--num-gpus=4", "--resume"):
        with pytest.raises(SettingError, match="the component sets it; use the component's --nodes"):
            train("--epochs", "1", flag)


def node_arguments(role: Role, values: macros.Values, folder: Path, **environ: str) -> list[str]:
    """What `stormo` is called with on a node, where the shell runs the command that a scheduler hands to it."""
    fake = folder / "stormo"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    replica = values.apply(role)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": "/root", **environ}
    done = subprocess.run(
        [replica.entrypoint, *replica.args], env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def values(replica_id: Any, rank0_env: str) -> macros.Values:
    return macros.Values(img_root="", app_id="job-7", replica_id=str(replica_id), rank0_env=rank0_env)


@pytest.mark.parametrize("scheduler", ["local", "slurm", "docker", "kubernetes", "aws_batch"])
def test_both_nodes_of_a_job_go_to_the_first_one(scheduler: str, tmp_path: Path) -> None:
    # The variables and values of each as TorchX's schedulers set them; replica 0 is told another story by some.
    own = subprocess.run(["hostname", "-i"], capture_output=True, text=True, check=True).stdout.split()[0]
    batch, host = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "TORCHX_RANK0_HOST"
    nodes: dict[str, list[tuple[Any, str, dict[str, str]]]] = {
        "local": [(0, host, {host: "localhost"}), (1, host, {host: "localhost"})],
        "slurm": [(n, "SLURM_JOB_NODELIST_HET_GROUP_0", {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1"}) for n in (0, 1)],
        "docker": [(0, host, {host: "app-stormo-0"}), (1, host, {host: "app-stormo-0"})],
        "kubernetes": [
            (0, host, {host: "localhost", "VC_STORMO_0_HOSTS": "app-stormo-0-0.app"}),
            (1, "VC_STORMO_0_HOSTS", {"VC_STORMO_0_HOSTS": "app-stormo-0-0.app"}),
        ],
        "aws_batch": [
            ("$AWS_BATCH_JOB_NODE_INDEX", batch, {"AWS_BATCH_JOB_NODE_INDEX": "0"}),
            ("$AWS_BATCH_JOB_NODE_INDEX", batch, {"AWS_BATCH_JOB_NODE_INDEX": "1", batch: own}),
        ],
    }
    first = {"local": "localhost", "slurm": "n1", "docker": "app-stormo-0", "kubernetes": "app-stormo-0-0.app"}
    role = train(*ODD, nodes=2, task="it's.py").roles[0]
    for node, (replica_id, rank0_env, environ) in enumerate(nodes[scheduler]):
        told = node_arguments(role, values(replica_id, rank0_env), tmp_path, **environ)
        place = ["--num-nodes", "2", "--node-id", str(node), "--master-addr", first.get(scheduler, own)]
        run = ["--run-name", "torchx-job-7", "--resume", "--num-gpus", "1"]
        assert told == ["train", "it's.py", *run, *place, "--master-port", "29500", *ODD]


def test_slurm_is_asked_for_a_node_of_gpus_for_each_replica(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "sinfo").symlink_to("/bin/false")
    with get_runner() as runner:
        request = runner.dryrun(train("--epochs", "1", nodes=2, gpus=4, cpus=32), "slurm").request.materialize()
    for node in (0, 1):
        asked = f"#SBATCH --job-name=stormo-{node} --requeue --ntasks-per-node=1 --cpus-per-task=32 --gpus-per-task=4\n"
        assert asked in request
        assert f"--node-id {node} " in request
    assert "--run-name torchx-'\"$SLURM_JOB_ID\"' --resume" in request
