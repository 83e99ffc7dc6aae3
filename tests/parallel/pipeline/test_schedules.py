"""The idle share against a simulation with torch's orders; the picture as text; micro-batches that fit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stormo.config.plan.parallelism import STAGES_PER_WORKER, even_bubble
from stormo.parallel.pipeline.schedules import Span, idle_share, most_micro_batches, worker_stages
from tests.parallel.pipeline.simulation import as_text, pipeline_order, simulate


@pytest.mark.parametrize("schedule", STAGES_PER_WORKER)
def test_the_closed_form_is_what_the_schedule_comes_to(schedule: str) -> None:
    for p, m in ((2, 2), (2, 4), (3, 6), (4, 4), (4, 12), (5, 20), (8, 32)):
        spans = simulate(pipeline_order(schedule, p, STAGES_PER_WORKER[schedule] * p, m))
        assert even_bubble(schedule, p, m) == pytest.approx(idle_share(spans, p)), (p, m)
    naive = simulate(pipeline_order("gpipe", 4, 4, 1))
    assert even_bubble("naive", 4, 1) == pytest.approx(idle_share(naive, 4)) == 3 / 4


def test_the_picture() -> None:
    assert as_text(simulate(pipeline_order("gpipe", 2, 2, 2))) == (
        "worker 0 | F0 F1 .  .  .  B0 -- B1 --\nworker 1 | .  F0 F1 B0 -- B1 -- .  ."
    )


def test_the_idle_share_of_measured_times() -> None:
    spans = [Span(0, 0.0, 0.031, "F", 0, 0), Span(1, 0.04, 0.1, "F", 0, 1), Span(0, 0.07, 0.1, "B", 0, 0)]
    assert idle_share(spans, 2) == pytest.approx(1 - (0.031 + 0.06 + 0.03) / 0.2)


def test_micro_batches_fit_the_batch() -> None:
    assert [most_micro_batches("gpipe", 2, size, 4) for size in (8, 6, 5, 3, 1)] == [4, 3, 1, 3, 1]
    assert most_micro_batches("naive", 2, 8, 4) == 1
    assert most_micro_batches("interleaved", 4, 18, 9) == 6  # 9 on 4 workers cannot be interleaved
    assert worker_stages(1, 3, 9) == [1, 4, 7]


def test_arithmetic_needs_no_torch() -> None:
    program = "import sys, stormo.parallel.pipeline.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
