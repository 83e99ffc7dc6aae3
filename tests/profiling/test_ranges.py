"""Named ranges: where they go, and that they go nowhere while nobody records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stormo.errors import SettingError
from stormo.profiling import ranges
from stormo.profiling.ranges import range_of, record_for_nsight, record_ranges


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    record_ranges("off")


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of NVTX, in a torch that has it."""
    calls: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    return calls


def test_a_range_that_nobody_records_is_one_shared_object() -> None:
    assert range_of("input") is range_of("exchange")
    with range_of("input"), range_of("input"):
        pass


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of:UserWarning")
def test_the_profiler_sees_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    # Read at the first start in a process, whose other tests look at what is printed.
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    assert record_ranges("profiler") == "off"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, range_of("optimizer"):
        torch.ones(1)
    assert "optimizer" in {average.key for average in profiler.key_averages()}
    assert record_ranges("off") == "profiler"


@pytest.mark.parametrize(("is_asked", "environ"), [(True, {}), (False, {"NSYS_PROFILING_SESSION_ID": "7"})])
def test_nsight_sees_ranges(pushed: list[str], is_asked: bool, environ: dict[str, str]) -> None:
    record_for_nsight(is_asked, environ)
    with range_of("optimizer"), pytest.raises(ValueError, match="inside"), range_of("exchange"):
        raise ValueError("inside")
    assert pushed == ["optimizer", "exchange", "pop", "pop"]


def test_without_nsight_nothing_is_marked(pushed: list[str]) -> None:
    record_for_nsight(False, {})
    with range_of("optimizer"):
        pass
    assert pushed == []


def test_nvtx_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SettingError, match=r"^--profile nvtx was set, but torch .* without CUDA"):
        record_for_nsight(True, {})
    record_for_nsight(False, {"NSYS_PROFILING_SESSION_ID": "7"})  # nobody asked: nothing can be marked
    assert range_of("input") is ranges._OFF
