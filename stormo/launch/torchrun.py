"""Ranks started by torchrun (torch.distributed.run), one agent a node; reads the variables it documents."""

from __future__ import annotations

from collections.abc import Mapping

from stormo.launch.place import Place, host_name, read_int


def detect(environ: Mapping[str, str]) -> bool:
    """Whether torchrun started this process; a bare RANK or WORLD_SIZE left in a shell does not count."""
    return "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ and "LOCAL_RANK" in environ


def place(environ: Mapping[str, str]) -> Place:
    """Who this process is, according to torchrun."""
    return Place(
        launcher="torchrun",
        rank=read_int(environ, "RANK"),
        world_size=read_int(environ, "WORLD_SIZE"),
        local_rank=read_int(environ, "LOCAL_RANK"),
        local_size=read_int(environ, "LOCAL_WORLD_SIZE"),
        node_id=read_int(environ, "GROUP_RANK"),
        num_nodes=read_int(environ, "GROUP_WORLD_SIZE"),
        master_addr=environ.get("MASTER_ADDR", ""),
        master_port=read_int(environ, "MASTER_PORT"),
        host=host_name(),
    )
