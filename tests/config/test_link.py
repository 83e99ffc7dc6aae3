from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from stormo.config import link
from stormo.config.layout import Layout
from stormo.config.link import (
    CANDIDATES,
    TUNED,
    Link,
    candidates,
    link_before,
    link_line,
    sends_half_gradients,
    too_few_cores_planned,
    uses_sockets,
)
from stormo.config.schema import ResolvedBatch
from stormo.errors import SettingError
from tests.config.test_plan import FACTS, H200, configured, layout_of, plan_of


@pytest.fixture(autouse=True)
def num_cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets how many cores this process may use, of how many; by default all of 64."""

    def is_given(cores: int, of: int = 64) -> None:
        monkeypatch.setattr(link, "num_cores", lambda: cores)
        monkeypatch.setattr(os, "cpu_count", lambda: of)

    is_given(64)
    return is_given


def test_socket_threads_need_cores(num_cores: Callable[[int, int], None]) -> None:
    layout = gpus(num_nodes=2)
    for cores, of, is_enough in ((16, 16, True), (15, 15, False), (4, 16, True)):  # the last is a launcher's share
        num_cores(cores, of)
        reason = "" if is_enough else "4 workers share 15 cores, and with socket threads each needs 4"
        assert too_few_cores_planned(layout) == reason
        own = f"NCCL's own settings: {reason}"
        assert (link_line(configured(), layout)["link"] == own) is not is_enough
        assert link_line(configured(tune_link=True), layout)["link"].endswith("are measured at the start")


def gpus(num_nodes: int = 1, **options: Any) -> Layout:
    return layout_of(gpus=[H200] * 4, num_nodes=num_nodes, **options)


def channels(found: list[dict[str, str]]) -> list[str]:
    return [one["NCCL_MAX_NCHANNELS"] for one in found]


def test_candidates_set_only_what_is_tuned() -> None:
    assert all(set(one) <= set(TUNED) for one in CANDIDATES)
    assert CANDIDATES[0] == dict(zip(TUNED, ("1", "1", "1", "4", "8388608"), strict=True))
    assert candidates({}, 132) == list(CANDIDATES)


def test_channels_take_few_of_the_multiprocessors() -> None:
    assert channels(candidates({}, 16)) == channels(candidates({}, 8)) == ["1", "1"]
    assert channels(candidates({}, 32)) == ["1", "1", "2"]
    assert len(candidates({"NCCL_MIN_NCHANNELS": "4", "NCCL_MAX_NCHANNELS": "4"}, 16)) == 1  # as the user says


def test_the_user_has_the_last_word() -> None:
    assert candidates({"NCCL_SOCKET_NTHREADS": "4"}, 132) == []
    four = candidates({"NCCL_MIN_NCHANNELS": "4", "NCCL_MAX_NCHANNELS": "4"}, 132)
    assert four == [{TUNED[2]: "1", TUNED[3]: "2", TUNED[4]: "8388608"}]
    every = dict.fromkeys(TUNED, "4")
    assert candidates(every, 132) == []
    equal = candidates({"NCCL_SOCKET_NTHREADS": "1", "NCCL_NSOCKS_PERTHREAD": "2"}, 132)
    assert channels(equal) == ["1", "2", "4"]
    assert candidates({"NCCL_DEBUG": "INFO"}, 132) == list(CANDIDATES)


def test_nccl_uses_sockets_between_slices_and_without_infiniband(tmp_path: Path) -> None:
    one, two = gpus(), gpus(num_nodes=2)
    assert not uses_sockets(one, {}, tmp_path)
    assert uses_sockets(one, {"NCCL_HOSTID": "a-1"}, tmp_path)
    assert uses_sockets(two, {}, tmp_path)
    assert uses_sockets(two, {}, tmp_path / "missing")
    (tmp_path / "mlx5_0").mkdir()
    assert not uses_sockets(two, {}, tmp_path)
    assert uses_sockets(two, {"NCCL_IB_DISABLE": "1"}, tmp_path)
    assert not uses_sockets(two, {"NCCL_NET": "AWS Libfabric"}, tmp_path / "missing")


@pytest.mark.parametrize(
    "wrong",
    [
        {"world_size": "4"},
        {"world_size": True},
        {"variables": {"LD_PRELOAD": "1"}},
        {"variables": {"NCCL_BUFFSIZE": "1e9"}},
        {"variables": {"NCCL_BUFFSIZE": "9" * 10}},
        {"variables": ["NCCL_BUFFSIZE"]},
        {"bucket_mb": 0.5},
        {"bucket_mb": 26},
        {"small_algo": "ring"},
        {"more": 1},
    ],
)
def test_a_link_in_a_file_is_checked(wrong: dict[str, Any]) -> None:
    one = Link(world_size=4, variables=CANDIDATES[1], bucket_mb=8, small_algo="tree", bucket_s=0.01, default_s=0.02)
    assert Link.read(asdict(one)) == one
    for content in (asdict(one) | wrong, [one.world_size], None, {"variables": {}}):
        with pytest.raises(ValueError, match=r"^it "):
            Link.read(content)


def test_its_text_names_what_differs() -> None:
    one = Link(world_size=4, variables=CANDIDATES[1], bucket_mb=8)
    assert str(one) == "1 channel, 1 socket thread, 2 sockets each, buffers of 8 MiB, gradient buckets of 8 MiB"
    assert str(Link(world_size=4)) == "NCCL's defaults"
    assert str(Link(world_size=4, small_algo="tree")) == "NCCL's defaults, small messages by a tree"


@pytest.mark.parametrize(
    ("per_node", "options", "is_halved"),
    [
        (1, {"num_nodes": 4}, True),
        (4, {"num_nodes": 1}, True),
        (4, {"num_nodes": 2}, False),  # a ring crosses the link of a node once, however many workers it has
        (4, {"num_nodes": 2, "strategy": "hsdp"}, False),
        (1, {"num_nodes": 4, "strategy": "zero2"}, False),  # gradients of 32 bits
        (1, {"num_nodes": 4, "strategy": "pipeline"}, False),
        (1, {"num_nodes": 4, "deterministic": True}, False),
    ],
)
def test_gradients_of_16_bits_are_sent_so_where_that_is_less(
    per_node: int, options: dict[str, Any], is_halved: bool
) -> None:
    flags = {"strategy": "fsdp", **options}
    layout = layout_of(gpus=[H200] * per_node, **flags)
    assert sends_half_gradients(configured(**flags), layout) is is_halved
    said = (
        "16-bit gradients are sent as they are and summed in 32 bits" in link_line(configured(**flags), layout)["link"]
    )
    assert said is is_halved


def test_a_link_that_was_not_measured_is_measured_under_another_strategy() -> None:
    one = Link(world_size=4, half_gradients=True)
    began = ResolvedBatch(global_batch_size=8, learning_rate=1.0, warmup_start=1.0, link=asdict(one))
    config = replace(configured(), resumed=began)
    assert link_before(config, gpus(strategy="fsdp")) == one
    assert link_before(config, gpus(strategy="ddp")) is None
    measured = replace(one, bucket_s=0.01, default_s=0.02)
    assert link_before(replace(config, resumed=replace(began, link=asdict(measured))), gpus(strategy="ddp")) == measured


def test_the_plan_says_what_is_done() -> None:
    def line(layout: Layout, **options: Any) -> str | None:
        return link_line(configured(**options), layout).get("link")

    assert line(layout_of(num_gpus=2)) is None
    assert line(layout_of(gpus=[H200])) is None
    assert line(gpus()) == "NCCL's own settings: inside a node it needs no sockets"
    two = line(gpus(num_nodes=2))
    assert two == "NCCL's socket settings are measured at the start where there is no InfiniBand"
    assert line(gpus(), tune_link=True) == "NCCL's socket settings are measured at the start"
    assert line(gpus(num_nodes=2), tune_link=False) == "NCCL's own settings (--no-tune-link)"
    assert (
        line(gpus(num_nodes=2), deterministic=True)
        == "NCCL's own settings: with --deterministic every start has the same"
    )
    sharded = line(gpus(num_nodes=2, strategy="fsdp"))
    assert sharded is not None
    assert sharded.startswith("NCCL's own settings: weights are gathered beside the computation")
    assert line(gpus(num_nodes=2, strategy="fsdp"), tune_link=True) == line(gpus(), tune_link=True)
    assert line(gpus(num_nodes=2), deterministic=True, tune_link=True) == line(gpus(), tune_link=True)
    began = ResolvedBatch(global_batch_size=8, learning_rate=1.0, warmup_start=1.0, link={"world_size": 4})
    assert "with which the run began" in link_line(replace(configured(), resumed=began), gpus())["link"]
    assert link_line(replace(configured(), resumed=began), gpus(num_nodes=2)) == {"link": two}
    assert line(layout_of(gpus=[H200]), tune_link=True) == "not measured: one worker has no link"
    with pytest.raises(SettingError, match=r"--tune-link was set with backend gloo.*; leave it out: NCCL needs GPUs"):
        plan_of(num_gpus=2, tune_link=True, facts=FACTS)
    with pytest.raises(SettingError, match="; set --backend nccl"):
        plan_of(gpus=[H200] * 2, backend="gloo", tune_link=True, facts=FACTS)
