"""fsdp against single on one device."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from benchmarks import fsdp_overhead
from stormo.system.hardware import visible_gpus


@pytest.mark.skipif(bool(visible_gpus()), reason="a GPU is visible")
def test_refuses_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fsdp_overhead.main([])
    assert "no GPU is visible" in capsys.readouterr().err


def test_both_sides_step_and_a_ratio_comes_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--preset", "tiny", "--batch-size", "1", "--pairs", "2", "--steps", "1"]
    assert fsdp_overhead.main(words) == 0
    figures = dict(word.split("=") for word in capsys.readouterr().out.splitlines()[-1].split()[1:])
    assert float(figures["median_ratio"]) > 0
    assert figures["pairs"] == "2"
    assert not dist.is_initialized()
