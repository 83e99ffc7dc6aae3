"""Communication libraries: which torch has, and whether each really joins and sums, here and alone."""

from __future__ import annotations

from collections.abc import Iterator

from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine

_GLOO_MEND = "check that the interface lo is up (ip link set lo up) and that nothing forbids sockets here"
_NCCL_MEND = "run again with NCCL_DEBUG=INFO, which says which part fails; see the findings on the GPUs and libraries"


def check(machine: Machine) -> Iterator[Finding]:
    """One finding a backend."""
    facts = machine.torch()
    if "error" in facts:
        yield Finding(check="backends", level="note", text="not tried: torch cannot be imported")
        return
    has = facts["backends"]
    if facts["gloo_error"] or not has["gloo"]:
        why = facts["gloo_error"] or "this torch is built without it"
        mend = _GLOO_MEND if has["gloo"] else "install a torch that has it: all of pytorch.org's do"
        yield Finding(check="gloo", level="error", text=f"Gloo does not work: {why}", mend=mend)
    else:
        yield Finding(check="gloo", level="ok", text="Gloo works: a group of one process on the loopback address sums")
    if facts["nccl_error"]:
        text = f"NCCL does not work: {facts['nccl_error']}"
        yield Finding(check="nccl", level="error", text=text, mend=_NCCL_MEND)
    elif facts["has_tried_nccl"]:
        yield Finding(check="nccl", level="ok", text=f"NCCL {facts.get('nccl')} works: one process sums on a GPU")
    elif has["nccl"]:
        yield Finding(check="nccl", level="note", text="NCCL is there, but no GPU that it could use")
    elif facts["num_gpus"]:
        mend = "install a torch that has it: all of pytorch.org's for Linux and CUDA do"
        yield Finding(check="nccl", level="error", text="GPUs, but a torch that is built without NCCL", mend=mend)
    else:
        yield Finding(check="nccl", level="ok", text="no NCCL, and no GPU that needs it")
    text = f"torch has {'an' if has['mpi'] else 'no'} MPI backend; stormo uses Gloo and NCCL"
    yield Finding(check="mpi-backend", level="ok", text=text, facts={"has_mpi": has["mpi"]})
