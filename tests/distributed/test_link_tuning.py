from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stormo.config.layout import Launched, resolve_layout
from stormo.config.link import CANDIDATES, Link
from stormo.config.schema import ResolvedBatch, Run, TrainConfig, Workers
from stormo.distributed import link_tuning
from stormo.distributed.link_tuning import (
    LIMIT_S,
    Figures,
    Probe,
    ProbeGroup,
    choose_link,
    crowded_host,
    nccl_library,
    search,
    tune,
)
from stormo.distributed.nccl_probe import LARGE_BYTES, SMALL_BYTES
from stormo.distributed.store import SignedStore
from stormo.distributed.world import World
from stormo.launch.rank_info import alone
from tests.config.test_plan import H200, configured, layout_of
from tests.distributed.fake_probe import DEFAULT_MS

BEST, SECOND = CANDIDATES[0], CANDIDATES[1]


def figures(bucket_ms: float, small_ms: float = 0.18, tree_ms: float = 0.2, **by_mib: float) -> Figures:
    """Figures of a bucket; smaller messages take their share, unless named such as mib8."""
    seconds = {size: bucket_ms / 1e3 * size / LARGE_BYTES[0] for size in LARGE_BYTES}
    seconds |= {int(name[3:]) << 20: value / 1e3 for name, value in by_mib.items()}
    small, tree = (dict.fromkeys(SMALL_BYTES, one / 1e3) for one in (small_ms, tree_ms))
    return {"seconds": seconds | small, "tree": tree}


class Bench:
    """Answers with given figures, one after the other for settings that are measured again."""

    def __init__(self, default: list[Figures], others: Mapping[int, list[Figures]] | None = None) -> None:
        self._left = [default, *((others or {}).get(number, []) for number in range(len(CANDIDATES)))]
        self.seen: list[int] = []  # -1 for the defaults
        self.calls: list[int] = []
        self.now_s, self.each_s = 0.0, 0.0

    def __call__(self, variables: Mapping[str, str], calls: int, every_size: bool) -> Figures:
        number = CANDIDATES.index(dict(variables)) if variables else -1
        self.seen.append(number)
        self.calls.append(calls)
        self.now_s += self.each_s
        left = self._left[number + 1] or [figures(20)]
        found = left.pop(0) if len(left) > 1 else left[0]
        if every_size:
            return found
        return {"seconds": {size: found["seconds"][size] for size in (SMALL_BYTES[0], LARGE_BYTES[0])}}

    def search(self) -> tuple[Link, int]:
        return search(CANDIDATES, self, 4, lambda: self.now_s)


def test_the_fastest_setting_wins_once_it_is_confirmed() -> None:
    bench = Bench([figures(14.5), figures(15)], {0: [figures(10.1), figures(10.4)], 1: [figures(11)]})
    link, num_left = bench.search()
    assert (link.variables, num_left) == (BEST, 0)
    assert bench.seen == [-1, 0, 1, 2, 3, 4, -1, 0]
    assert (link.bucket_s, link.default_s) == pytest.approx((0.0104, 0.0145))  # its worse, and their better time
    assert (
        str(link)
        == "1 channel, 1 socket thread, 4 sockets each, buffers of 8 MiB: 25 MiB in 10.4 ms instead of 14.5 (NCCL's "
        "defaults)"
    )


@pytest.mark.parametrize(
    ("default", "first"),
    [
        ([10, 10], [9.6]),  # by less than 5 %
        ([14, 10], [9.6]),  # the first figure of the defaults was disturbed
        ([10, 10], [9.0, 9.6]),  # the first figure of the winner was lucky
    ],
)
def test_defaults_stay_unless_others_are_surely_faster(default: list[float], first: list[float]) -> None:
    bench = Bench([figures(one) for one in default], {0: [figures(one) for one in first]})
    link, _ = bench.search()
    assert link.variables == {}
    assert link.bucket_s == link.default_s == pytest.approx(0.01)
    assert str(link) == "NCCL's defaults: 25 MiB in 10.0 ms"


def test_small_messages_decide_between_equal_ones() -> None:
    link, _ = Bench([figures(14)], {0: [figures(10)], 1: [figures(10.2, 0.1)], 2: [figures(10.5, 0.05)]}).search()
    assert link.variables == SECOND


def test_the_bucket_shrinks_only_where_its_bytes_are_faster() -> None:
    assert Bench([figures(10, mib8=2.9)]).search()[0].bucket_mb == 8
    assert Bench([figures(10, mib8=3.1)]).search()[0].bucket_mb is None
    link, _ = Bench([figures(10, mib8=1)], {0: [figures(8, mib10=2.5)]}).search()  # of the chosen settings
    assert (link.variables, link.bucket_mb) == (BEST, 10)


def test_small_messages_take_a_tree_where_it_is_faster() -> None:
    assert Bench([figures(10, 0.18, 0.07)]).search()[0].small_algo == "tree"
    assert Bench([figures(10, 0.18, 0.175)]).search()[0].small_algo is None
    with_algo = {"seconds": figures(10)["seconds"]}  # the user's
    assert Bench([with_algo]).search()[0].small_algo is None


def test_the_search_ends_in_time() -> None:
    bench = Bench([figures(14)], {0: [figures(10)]})
    bench.each_s = LIMIT_S / 4.5
    link, num_left = bench.search()
    assert bench.seen == [-1, 0, 1, -1, 0]
    assert (link.variables, num_left) == (BEST, 3)
    bench = Bench([figures(14)], {0: [figures(10)]})
    bench.each_s = LIMIT_S / 2
    link, num_left = bench.search()
    assert (link.variables, num_left, bench.seen) == ({}, 5, [-1, -1])


def test_a_slow_link_gets_fewer_calls() -> None:
    bench = Bench([figures(90)])
    bench.search()
    assert bench.calls == [5, *[2] * 7]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "stormo" / "links"


Tuned = Callable[..., list[tuple[Link, str]]]


@pytest.fixture
def run(tmp_path: Path, cache: Path) -> Tuned:
    """Tune with real probes, whose figures are made up; ranks are threads."""

    def tuned(size: int = 3, fault: str = "", faulty: int = -1, **member: Any) -> list[tuple[Link, str]]:
        shared = dist.HashStore()

        def rank(number: int) -> tuple[Link, str]:
            group = ProbeGroup(SignedStore(shared, "link", b""), number, size, timedelta(seconds=60))
            words = [str(tmp_path), str(number), fault if number == faulty else ""]
            program = [sys.executable, "-m", "tests.distributed.fake_probe"]
            described = {"host": "a", "gpu": "H200", "nccl": [2, 28, 9], "has_library": True, "variables": {}}
            described |= {"multiprocessors": 132} | member
            limit_s = 2.0 if fault == "hang" and number == faulty else 60.0
            return tune(group, described, lambda: Probe(lambda fd: [*program, str(fd), *words], limit_s))

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(rank, range(size)))

    return tuned


def measured(folder: Path) -> list[list[str]]:
    """What each rank's probe did: number of the order, channels, id."""
    return [file.read_text().splitlines() for file in sorted(folder.glob("rank-*"))]


def test_ranks_measure_together_and_agree(run: Tuned, tmp_path: Path, cache: Path) -> None:
    (link, text), *others = run()
    assert link.variables == BEST
    assert (link.world_size, link.small_algo, link.bucket_mb) == (3, "tree", None)
    assert link.bucket_s == pytest.approx(0.0102)  # of the slowest rank
    assert link.default_s == pytest.approx((DEFAULT_MS + 0.2) / 1e3)
    assert [other for other, _ in others] == [link] * 2
    assert text.startswith("The link was measured in ")
    assert text.endswith(": 25 MiB in 10.2 ms instead of 14.7 (NCCL's defaults)")
    first, *rest = measured(tmp_path)
    assert [line.split()[1] for line in first] == ["default", *"11248", "default", "1"]
    assert rest == [first] * 2  # the same orders with the same ids
    assert len({line.split()[-1] for line in first}) == 8  # each in a process of its own
    again = run()
    assert [other for other, _ in again] == [link] * 3
    assert "was measured earlier" in again[0][1]
    assert measured(tmp_path) == [first] * 3


def test_another_job_is_measured_anew(run: Tuned, tmp_path: Path, cache: Path) -> None:
    run(size=1)
    for changed in (
        {"host": "b"},
        {"gpu": "A100"},
        {"nccl": [2, 29, 0]},
        {"variables": {"NCCL_SOCKET_IFNAME": "eth1"}},
    ):
        before = len(list(cache.iterdir()))
        run(size=1, **changed)
        assert len(list(cache.iterdir())) == before + 1


def test_a_damaged_cache_is_replaced(run: Tuned, cache: Path) -> None:
    (link, _), *_ = run(size=1)
    (file,) = cache.iterdir()
    hostile = {"link": asdict(link) | {"variables": {"NCCL_NET_PLUGIN": "1"}}}
    for content in ("{", "{}", json.dumps(hostile)):
        file.write_text(content)
        ((again, text),) = run(size=1)
        assert again == link
        assert f"{file} is damaged and is replaced." in text
        assert json.loads(file.read_text())["link"] == asdict(link)


def test_a_cache_that_cannot_be_written_is_said(run: Tuned, cache: Path) -> None:
    cache.parent.write_text("a file")
    ((link, text),) = run(size=1)
    assert link.variables == BEST
    assert "it is not kept for later runs" in text
    assert "damaged" not in text


def test_a_user_without_a_home_folder_can_train(run: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    def expanduser(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", expanduser)
    ((link, text),) = run(size=1)
    assert link.variables == BEST
    assert "it is not kept for later runs (Could not determine home directory.)" in text


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("crash", "the measuring process crashed"),
        ("error", "ncclAllReduce gave error 3"),
        ("hang", "it took longer than 2 s"),
        ("gone", "the measuring process is gone"),
    ],
)
def test_a_failed_probe_leaves_the_defaults(run: Tuned, cache: Path, fault: str, reason: str, faulty: int) -> None:
    found = run(2, fault, faulty)
    assert [link for link, _ in found] == [Link(world_size=2)] * 2
    assert found[0][1] == f"The link is not tuned, NCCL's defaults stay: rank {faulty}: {reason}"
    assert not cache.exists()


def test_the_users_variables_stay(run: Tuned, tmp_path: Path) -> None:
    ((link, _),) = run(size=1, variables={"NCCL_SOCKET_NTHREADS": "1", "NCCL_ALGO": "Ring"})
    assert link.variables == {name: value for name, value in BEST.items() if name != "NCCL_SOCKET_NTHREADS"}
    assert link.small_algo is None
    assert [line.split()[1] for line in measured(tmp_path)[0]] == ["default", *"11248", "default", "1"]


def test_nccl_inside_torch_is_not_tuned(run: Tuned, tmp_path: Path) -> None:
    found = run(2, has_library=False)
    assert [link for link, _ in found] == [Link(world_size=2)] * 2
    assert found[0][1] == "The link is not tuned: NCCL is a part of this torch"
    assert measured(tmp_path) == []


def test_a_resume_takes_the_link_over() -> None:
    link = Link(world_size=4, variables=BEST, bucket_s=0.010, default_s=0.0145)
    began = ResolvedBatch(global_batch_size=64, learning_rate=0.1, warmup_start=0.1, link=asdict(link))
    config = TrainConfig(resumed=began)
    launched = Launched(launcher="torchrun", world_size=4, local_size=4, num_nodes=1)
    layout = resolve_layout(config, [H200] * 4, launched)
    arguments: Any = (layout, alone(), None, torch.device("cpu"))
    assert choose_link(config, *arguments)[0] == link
    assert choose_link(replace(config, workers=Workers(tune_link=False)), *arguments) == (None, "")
    exact = replace(config, run=Run(deterministic=True))
    assert choose_link(exact, *arguments)[0] == link
    assert choose_link(replace(exact, resumed=None), *arguments) == (None, "")

    class StoreAskedError(Exception):
        pass

    class AnyStore:
        def signed(self, prefix: str) -> None:
            raise StoreAskedError

    other = replace(layout, world_size=3)
    with pytest.raises(StoreAskedError):  # another number of workers is measured again
        choose_link(config, other, alone(), AnyStore(), torch.device("cpu"))  # type: ignore[arg-type]


class FreshStore:
    """A store for one rank, empty for each use."""

    timeout = timedelta(seconds=5)

    def signed(self, prefix: str) -> SignedStore:
        """A part of it."""
        return SignedStore(dist.HashStore(), prefix, b"")


def test_sharded_layers_send_16_bits_where_nccl_uses_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**flags: Any) -> Link | None:
        config = configured(strategy="fsdp", **flags)
        store: Any = FreshStore()
        return choose_link(config, layout_of([H200] * 4, strategy="fsdp"), alone(), store, torch.device("cpu"))[0]

    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(link_tuning, "crowded_host", lambda cores: "")
    assert chosen() is None  # inside a node
    monkeypatch.setattr(link_tuning, "tune", lambda *_: (Link(world_size=4, variables=BEST), ""))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert chosen(tune_link=True) == Link(world_size=4, variables=BEST)
    monkeypatch.setenv("NCCL_HOSTID", "slice-0")
    assert chosen(tune_link=True) == Link(world_size=4, variables=BEST, half_gradients=True)
    assert chosen() == Link(world_size=1, half_gradients=True)
    assert chosen(tune_link=False) is None
    assert chosen(deterministic=True) is None


@pytest.mark.parametrize(
    ("cores", "reason"),
    [
        ([("n1", range(4)), ("n1", range(4, 8))], ""),  # each has its own
        ([("n1", range(8)), ("n1", range(8))], ""),
        ([("n1", range(7)), ("n1", range(7))], "2 workers share 7 cores"),  # of a larger machine
        ([("n1", range(8)), ("n2", range(4)), ("n2", range(4))], "2 workers share 4 cores"),
    ],
)
def test_workers_that_share_few_cores_are_found_on_every_host(cores: list[tuple[str, range]], reason: str) -> None:
    assert crowded_host(cores).partition(",")[0] == reason


def test_a_link_that_is_not_tuned_for_want_of_cores_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "slice-0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    store: Any = FreshStore()
    for on_machine, text in ((64, "NCCL's own settings stay: 1 worker has 2 cores, and"), (2, "")):
        monkeypatch.setattr("stormo.config.link.num_cores", lambda: 2)
        monkeypatch.setattr(os, "cpu_count", lambda count=on_machine: count)
        link, told = choose_link(configured(), layout_of([H200] * 4), alone(), store, torch.device("cpu"))
        assert link is None
        assert told.startswith(text)
        assert bool(told) == bool(text)  # the plan has said it


def test_the_library_is_the_one_that_torch_has_loaded(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        assert nccl_library() is None
    line = "7f00-7f01 r-xp 00000000 08:01 42   /venv/nvidia/nccl/lib/libnccl.so.2\n"
    (tmp_path / "maps").write_text(f"7e00-7e01 r-xp 00000000 00:00 0\n{line}")
    assert nccl_library(tmp_path / "maps") == "/venv/nvidia/nccl/lib/libnccl.so.2"


def _joined(world: World) -> tuple[dict[str, str | None], Link | None]:
    """What NCCL finds in the environment of a worker whose user has set one of the variables."""
    os.environ["NCCL_SOCKET_NTHREADS"] = "3"
    link = Link(world_size=1, variables=BEST)
    joined = World(alone(), torch.device("cpu"), needs_group=True, choose_link=lambda: link)
    try:
        return {name: os.environ.pop(name, None) for name in BEST}, joined.link
    finally:
        joined.close()


def test_nccl_is_told_before_the_workers_join(run_ranks: Callable[..., list[Any]]) -> None:
    ((told, link),) = run_ranks(_joined, 1)
    assert told == BEST | {"NCCL_SOCKET_NTHREADS": "3"}
    assert link == Link(world_size=1, variables=BEST)


TASK = str(Path(__file__).parents[1] / "tiny_task.py")
FLAGS = "--num-gpus 2 --global-batch-size 64 --target-accuracy 2 --no-tensorboard --run-name tuned"


@pytest.mark.gpu
@pytest.mark.slices(2)
def test_a_training_on_slices_is_tuned_and_a_resume_takes_it_over(tmp_path: Path) -> None:
    def train(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "stormo", "train", TASK, *FLAGS.split(), *words],
            cwd=tmp_path,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = train("--epochs", "1")
    assert "The link was measured in " in first
    summary = tmp_path / "runs" / "tuned" / "summary.json"
    found = Link.read(json.loads(summary.read_text())["link"])
    assert found.world_size == 2
    assert found.default_s is not None
    assert found.bucket_s is not None
    assert found.bucket_s <= found.default_s
    (file,) = (tmp_path / "stormo" / "links").iterdir()
    assert Link.read(json.loads(file.read_text())["link"]) == found
    assert "The link is set as when the run began" in train("--epochs", "2", "--resume")
    assert Link.read(json.loads(summary.read_text())["link"]) == found
