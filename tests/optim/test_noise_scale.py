"""The estimates of the gradient noise scale: unbiased for any sizes, a range that covers the truth, plain advice."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stormo.optim.noise_scale import NUM_MOMENTS, TOO_FEW_STEPS, NoiseScale, estimate, fold, solve


@pytest.mark.parametrize(("small", "large"), [(16.0, 64), (7 / 3, 7), (1.0, 2)])
@pytest.mark.parametrize("sigma", [0.0, 1.7])
def test_both_are_found_exactly_from_expected_norms(small: float, large: int, sigma: float) -> None:
    trace, square = 12.5, 0.3
    seen = trace + sigma**2 * (trace + square)  # what factors of this spread make of the samples' covariance
    norms = (square + seen / small, square + seen / large)
    found = [row[0] * norms[0] + row[1] * norms[1] for row in solve(small, large, sigma)]
    assert found == pytest.approx([trace, square], rel=1e-12)


def _folded(blocks: Tensor) -> list[float]:
    """Blocks [number, (trace, square)] of 8 steps each."""
    moments = torch.zeros(NUM_MOMENTS, dtype=torch.float64)
    for block in blocks:
        moments = fold(moments, torch.cat([block * 8, torch.tensor([8.0], dtype=torch.float64)]))
    return [float(value) for value in moments]


def test_a_ratio_of_averages_in_which_the_newest_weigh_most() -> None:
    blocks = torch.tensor([[30.0, 1.0], [20.0, 3.0]], dtype=torch.float64).repeat(5, 1)
    kept = (1 - 1 / 512) ** 8
    weights = [kept**age for age in reversed(range(10))]
    trace = sum(w * float(b[0]) for w, b in zip(weights, blocks, strict=True))
    square = sum(w * float(b[1]) for w, b in zip(weights, blocks, strict=True))
    assert estimate(_folded(blocks)).value == pytest.approx(trace / square, rel=1e-12)


@pytest.mark.parametrize("block", [[math.inf, 1.0, 8.0], [math.nan, 1.0, 8.0], [0.0, 0.0, 0.0]])
def test_blocks_without_steps_or_with_an_overflow_change_nothing(block: list[float]) -> None:
    before = torch.tensor(_folded(torch.ones(3, 2, dtype=torch.float64)), dtype=torch.float64)
    assert torch.equal(fold(before, torch.tensor(block, dtype=torch.float64)), before)


def test_the_range_covers_the_truth_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(1)
    num_runs, trace, square, covered, width = 200, 50.0, 0.5, 0, 0.0
    for _ in range(num_runs):
        drawn = torch.randn(25, 2, generator=generator, dtype=torch.float64)
        blocks = torch.stack([trace + 10 * drawn[:, 0] - 4 * drawn[:, 1], square + 0.3 * drawn[:, 1]], dim=1)
        found = estimate(_folded(blocks))
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= trace / square <= found.high
        width += (found.high - found.low) / num_runs
    assert 0.90 <= covered / num_runs <= 0.995  # 95 % and three times the spread of 200 draws
    assert 30 < width < 100  # of a ratio of 100 whose relative spread is about 0.14


def test_what_is_too_uncertain_has_no_range_and_says_why() -> None:
    generator = torch.Generator().manual_seed(2)
    assert estimate([0.0] * NUM_MOMENTS) == NoiseScale(value=None, reason=TOO_FEW_STEPS)
    few = estimate(_folded(torch.tensor([[4.0, 2.0]] * 5, dtype=torch.float64)))
    assert few.value == pytest.approx(2.0)
    assert (few.low, few.reason) == (None, TOO_FEW_STEPS)
    negative = estimate(_folded(torch.tensor([[4.0, -2.0]] * 30, dtype=torch.float64)))
    assert (negative.value, negative.low) == (None, None)
    drawn = torch.randn(40, generator=generator, dtype=torch.float64)
    drawn = (drawn - drawn.mean()) / drawn.std()  # so that its mean lies 0.32 to both sides with 95 %
    for square, reason in ((0.2, "has no upper bound"), (0.36, "is as wide as 13 to")):
        found = estimate(_folded(torch.stack([torch.full((40,), 9.0).double(), square + drawn], dim=1)))
        assert (found.low, found.high) == (None, None)
        assert reason in found.reason
        assert found.advice(512).endswith(f"because {found.reason}.")


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (512, "you train at 512, so more workers pay: up to about 6 times as many, each with the same batch."),
        (2048, "you train at 2,048, which is about there: more workers pay little."),
        (8192, "you train at 8,192, which is beyond it: more workers do not pay."),
        (65536, "you train at 65,536, which is far beyond it: more workers do not pay."),
    ],
)
def test_advice_is_one_sentence_with_its_range(batch: int, expected: str) -> None:
    found = NoiseScale(value=3071.6, low=2512.0, high=3977.0)
    begin = "Gradient noise scale: larger batches bring little beyond about 3,100 samples (2,500 to 4,000 with 95 %); "
    assert found.advice(batch) == begin + expected
    assert NoiseScale(value=None, reason=TOO_FEW_STEPS).advice(batch) == (
        "Gradient noise scale: nothing can be said of the useful batch, because too few steps were measured."
    )
