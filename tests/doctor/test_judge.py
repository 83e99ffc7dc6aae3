"""What the measurements of a job mean: tables of measured values and the findings that must follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stormo.doctor.finding import Finding
from stormo.doctor.judge import Names, judge, sentence
from stormo.doctor.measure import Attempt, Device, Link, Measurements, WorkerInfo, partners, rounds
from stormo.doctor.preflight import HungError, describe_hang, notices_of
from stormo.telemetry.text import format_bytes, format_time

GPU = Device(
    rank=0,
    name="H200",
    kind="cuda",
    flops_per_s=7e14,
    digest="a",
    free_bytes=140 << 30,
    versions={"torch": "2.11", "NVIDIA driver": "570"},
)


def workers(num_nodes: int, per_node: int = 1) -> list[WorkerInfo]:
    return [
        WorkerInfo(
            rank=rank,
            node=rank // per_node,
            local_rank=rank % per_node,
            host=f"n{rank // per_node}",
            address="10.0.0.9",
        )
        for rank in range(num_nodes * per_node)
    ]


def bad(measured: Measurements) -> list[tuple[str, str, str]]:
    return [(one.check, one.level, one.where) for one in judge(measured) if one.level != "ok"]


def attempts(num_nodes: int, failed: dict[tuple[int, int], str]) -> list[Attempt]:
    return [
        Attempt(node=node, to=to, outcome=failed.get((node, to), "ok"))
        for node in range(num_nodes)
        for to in partners(node, num_nodes)
    ]


@pytest.mark.parametrize(
    ("num_nodes", "failed", "expected"),
    [
        (3, {}, []),
        (
            2,
            {(0, 1): "timeout"},
            [("node 1 (n1, 10.0.0.9)", "cannot be reached from node 0 (n0): the connection timed")],
        ),
        (
            4,
            {(1, 2): "refused", (2, 1): "refused"},
            [
                (
                    "node 2 (n2, 10.0.0.9)",
                    "cannot be reached from node 1 (n1): the connection was refused, nor the other",
                )
            ],
        ),
        # A node that nobody reaches is one finding, even when it reaches nobody either.
        (
            4,
            {pair: "timeout" for other in (0, 1, 2) for pair in ((other, 3), (3, other))},
            [("node 3 (n3, 10.0.0.9)", "cannot be reached from any other node: the connection timed out")],
        ),
        (3, {(0, 2): "packets"}, [("node 2 (n2, 10.0.0.9)", "cannot be reached from node 0 (n0): small packets pass")]),
    ],
)
def test_who_cannot_be_reached(
    num_nodes: int, failed: dict[tuple[int, int], str], expected: list[tuple[str, str]]
) -> None:
    found = judge(Measurements(workers=workers(num_nodes), attempts=attempts(num_nodes, failed)))
    errors = [one for one in found if one.level == "error"]
    assert [one.where for one in errors] == [where for where, _ in expected]
    assert all(one.text.startswith(text) for one, (_, text) in zip(errors, expected, strict=True)), errors


def devices(**changed: Any) -> list[Device]:
    """Four GPUs on two nodes, of which the last one differs."""
    return [
        *(replace(GPU, rank=rank, uuid=str(rank)) for rank in range(3)),
        replace(GPU, rank=3, **{"uuid": "3", **changed}),
    ]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"flops_per_s": 5.7e14}, []),
        ({"flops_per_s": 5e14}, [("device-speed", "warning")]),
        ({"flops_per_s": 3e14}, [("device-speed", "error")]),
        ({"is_exact": False, "digest": "b"}, [("arithmetic", "error")]),
        ({"digest": "b"}, [("bits", "warning")]),
        ({"free_bytes": 100 << 30}, [("device-memory", "warning")]),
        ({"name": "H100", "flops_per_s": 3e14, "digest": "b"}, []),  # another model is compared with its own peers
        ({"flops_per_s": 3e14, "uuid": "2"}, []),  # two workers share a GPU on purpose
    ],
)
def test_which_device_is_bad(changed: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    found = bad(Measurements(workers=workers(2, 2), devices=devices(**changed)))
    assert found == [(check, level, "rank 3 (n1, local rank 1)") for check, level in expected]


def test_cpus_may_be_slower_as_other_programs_share_them() -> None:
    slow = [replace(one, kind="cpu", uuid="") for one in devices(flops_per_s=3.5e14, digest="b", free_bytes=1)]
    assert bad(Measurements(workers=workers(4), devices=slow)) == [("bits", "note", "rank 3 (n3)")]


@pytest.mark.parametrize(("kind", "level"), [("torch", "error"), ("NVIDIA driver", "warning")])
def test_versions_that_differ_are_named_by_node(kind: str, level: str) -> None:
    odd = devices(versions={**GPU.versions, kind: "0"})
    (found,) = [one for one in judge(Measurements(workers=workers(4), devices=odd)) if one.check == "versions"]
    assert (found.level, found.text) == (level, f"{kind} is 0 on node 3 (n3) and {GPU.versions[kind]} on the others")


@pytest.mark.parametrize(("is_needed", "level"), [(False, "note"), (True, "error")])
def test_a_folder_that_a_node_does_not_see(is_needed: bool, level: str) -> None:
    blind = [replace(one, sees_runs_folder=one.rank != 2) for one in devices()]
    seen = Measurements(
        workers=workers(2, 2),
        devices=blind,
        runs_folder="runs",
        runs_folder_free_bytes=1 << 40,
        needs_shared_folder=is_needed,
    )
    assert bad(seen) == [("shared-folder", level, "")]
    assert bad(replace(seen, runs_folder_free_bytes=None)) == [("runs-folder", "error", "")]


def between(num_nodes: int, rates: dict[tuple[int, int], float]) -> list[Link]:
    pairs = [pair for pairs in rounds(num_nodes) for pair in pairs]
    return [Link(a=a, b=b, width=2, latency_s=1e-5, bytes_per_s=rates.get((a, b), 1e10)) for a, b in pairs]


@pytest.mark.parametrize(
    ("num_nodes", "rates", "expected"),
    [
        (2, {(0, 1): 1e6}, []),  # nothing to compare it with
        (3, {(1, 2): 6e9}, []),
        (3, {(1, 2): 4e9}, [("link", "warning", "node 1 (n1) and node 2 (n2)")]),
        (4, {(0, 3): 5e8}, [("link", "error", "node 0 (n0) and node 3 (n3)")]),
        # With a bad node most links of three nodes are slow, and yet the other two are not to blame.
        (3, {(0, 2): 4e9, (1, 2): 4e9}, [("node", "warning", "node 2 (n2)")]),
        (3, {(0, 1): 4e8, (0, 2): 5e8}, [("node", "error", "node 0 (n0)")]),
        (
            5,
            {(0, 4): 4e9, (1, 4): 4e9, (2, 4): 4e9, (3, 4): 4e9, (1, 2): 3e9},
            [("node", "warning", "node 4 (n4)"), ("link", "warning", "node 1 (n1) and node 2 (n2)")],
        ),
    ],
)
def test_which_node_or_link_is_slow(
    num_nodes: int, rates: dict[tuple[int, int], float], expected: list[tuple[str, str, str]]
) -> None:
    assert bad(Measurements(workers=workers(num_nodes, 2), between=between(num_nodes, rates))) == expected


def test_a_link_that_answers_late_and_a_node_that_is_slow_inside() -> None:
    late = [replace(link, latency_s=5e-3) if (link.a, link.b) == (0, 2) else link for link in between(4, {})]
    inside = [
        Link(a=node, b=node, width=2, latency_s=1e-5, bytes_per_s=1e9 if node == 1 else 1e11) for node in range(4)
    ]
    assert bad(Measurements(workers=workers(4, 2), between=late, inside=inside)) == [
        ("inside", "warning", "node 1 (n1)"),
        ("latency", "warning", "node 0 (n0) and node 2 (n2)"),
    ]


@pytest.mark.parametrize(
    ("phase", "missing", "where"),
    [
        ("arrival", [2, 3], "node 1 (n1)"),
        ("device", [1], "rank 1 (n0, local rank 1)"),
        ("round 0", [2, 3, 4, 5], "node 1 (n1) and node 2 (n2)"),
        ("all", list(range(8)), "node 0 (n0), node 1 (n1), node 2 (n2) and node 3 (n3)"),
    ],
)
def test_ranks_that_did_not_finish_are_named(phase: str, missing: list[int], where: str) -> None:
    (found,) = describe_hang(HungError(phase, 5.0, missing, {}), Names(workers(4, 2)), [[(0, 3), (1, 2)]])
    assert (found.where, found.level) == (where, "error")
    assert "within 5 s" in found.text


def test_a_worker_that_failed_is_named_with_its_error() -> None:
    (found,) = describe_hang(HungError("device", 5.0, [], {3: "RuntimeError: ECC"}), Names(workers(2, 2)), [])
    assert sentence(found).startswith(
        "rank 3 (n1, local rank 1) failed in the phase device: RuntimeError: ECC; look at"
    )


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 7, 8])
def test_rounds_have_every_pair_once_and_no_node_twice(num_nodes: int) -> None:
    played = rounds(num_nodes)
    pairs = [pair for turn in played for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(num_nodes) for b in range(a + 1, num_nodes)]
    assert all(len({node for pair in turn for node in pair}) == 2 * len(turn) for turn in played)


def test_a_large_job_tries_a_bounded_number_of_partners() -> None:
    played = rounds(1000, 20)
    assert [len(turn) for turn in played] == [500] * 20
    assert len({pair for turn in played for pair in turn}) == 20 * 500
    assert len(partners(77, 1000)) == 10


def test_notices_of_a_training() -> None:
    measured = Measurements(workers=workers(3, 2), between=between(3, {(1, 2): 4e9}))
    warned = notices_of(measured, judge(measured))
    assert [notice.kind for notice in warned] == ["info", "warning"]
    assert warned[0].text == "preflight: 6 workers on 3 nodes, 4 GB/s or more between nodes, 1 warning"
    assert warned[1].text.startswith(
        "preflight: node 1 (n1) and node 2 (n2) exchange 4 GB/s, 40% of the usual 10 GB/s; "
    )
    well = [Finding(check="links", level="ok", text="")]
    assert notices_of(measured, well)[0].text.endswith("no slow device or link")


def test_sizes_and_times_in_text() -> None:
    sizes = [format_bytes(value) for value in (0, 12, 999.6, 1.5e3, 999.6e6, 1.234e9, 123.4e12, 12.3456e15)]
    assert sizes == ["0 B", "12 B", "1 kB", "1.5 kB", "1 GB", "1.23 GB", "123 TB", "12346 TB"]
    assert [format_time(value) for value in (3.5e-5, 0.0123, 2.0)] == ["35 µs", "12.3 ms", "2 s"]
