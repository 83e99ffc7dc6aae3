"""Who a rank of mpirun is."""

from __future__ import annotations

import pytest

from stormo.errors import SettingError
from stormo.launch.environments import mpi
from stormo.launch.rank_info import DEFAULT_MASTER_PORT


def open_mpi(rank: int, size: int, local_rank: int, local_size: int, **more: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "PMIX_NAMESPACE": "1234567890",
        **more,
    }


def hydra(rank: int, size: int, local_rank: int, local_size: int, **more: str) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "PMI_FD": "9",
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(local_size),
        **more,
    }


@pytest.mark.parametrize("family", [open_mpi, hydra])
def test_a_rank_on_one_node_knows_its_rank(family: type) -> None:
    environ = family(1, 4, 1, 4)
    assert mpi.detect(environ)
    info = mpi.rank_info(environ)
    assert (info.rank, info.world_size, info.local_rank, info.local_size) == (1, 4, 1, 4)
    assert (info.node_id, info.num_nodes, info.master_addr) == (0, 1, "127.0.0.1")


@pytest.mark.parametrize(
    ("numbers", "node_id"),
    [((5, 8, 1, 4), 1), ((3, 8, 3, 4), 0), ((5, 8, 2, 4), 1), ((6, 8, 3, 4), 0), ((3, 4, 0, 1), 3)],
)
def test_the_node_follows_from_both_usual_orders(numbers: tuple[int, int, int, int], node_id: int) -> None:
    info = mpi.rank_info(open_mpi(*numbers, MASTER_ADDR="n1"))
    assert info.node_id == node_id
    assert info.num_nodes == numbers[1] // numbers[3]
    assert info.master_addr == "n1"


def test_several_nodes_need_a_master_address() -> None:
    with pytest.raises(SettingError, match=r"2 nodes and no --master-addr was set.*set --master-addr"):
        mpi.rank_info(open_mpi(5, 8, 1, 4))


def test_nodes_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(SettingError, match="4 is no multiple of 3"):
        mpi.rank_info(open_mpi(0, 4, 0, 3, MASTER_ADDR="n1"))


def test_an_unusual_order_is_refused() -> None:
    with pytest.raises(SettingError, match="neither the order node by node nor the order in turn"):
        mpi.rank_info(open_mpi(3, 8, 0, 4, MASTER_ADDR="n1"))


def test_the_port_follows_the_job_and_yields_to_the_user() -> None:
    first, second = (mpi.rank_info(open_mpi(0, 2, 0, 2, PMIX_NAMESPACE=name)).master_port for name in ("a@1", "b@1"))
    assert first != second
    older = open_mpi(0, 2, 0, 2, OMPI_MCA_ess_base_jobid="99")
    del older["PMIX_NAMESPACE"]
    assert mpi.rank_info(older).master_port not in (first, DEFAULT_MASTER_PORT)
    assert mpi.rank_info(hydra(0, 2, 0, 2)).master_port == DEFAULT_MASTER_PORT
    assert mpi.rank_info(hydra(0, 2, 0, 2, MASTER_PORT="20000")).master_port == 20000


def test_one_rank_is_no_launch_of_many() -> None:
    assert not mpi.detect(open_mpi(0, 1, 0, 1))
    assert not mpi.detect(hydra(0, 1, 0, 1))
