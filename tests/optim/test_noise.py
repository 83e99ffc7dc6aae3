"""Noise on gradients as the papers define it: what it keeps, what it restores, and that it depends on nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stormo.optim.noise import Chunk, ScaleRows, add_noise, annealed_sigma, factor_sigma, sample_factors


@pytest.mark.parametrize(("num_samples", "small", "sigma"), [(4096, 512, 7**0.5), (512, 512, 0.0), (100, 512, 0.0)])
def test_the_spread_of_the_factors_follows_from_both_batches(num_samples: int, small: int, sigma: float) -> None:
    assert factor_sigma(num_samples, small) == pytest.approx(sigma)
    factors = sample_factors(num_samples, small, seed=3)
    assert factors.dtype == torch.float64
    assert float(factors.mean()) == pytest.approx(1.0, abs=5 * sigma / num_samples**0.5)
    assert float(factors.std()) == pytest.approx(sigma, rel=5 / num_samples**0.5)


def test_factors_are_a_function_of_their_seed() -> None:
    assert torch.equal(sample_factors(64, 16, 5), sample_factors(64, 16, 5))
    assert not torch.equal(sample_factors(64, 16, 5), sample_factors(64, 16, 6))


def test_the_mean_is_kept_and_the_covariance_is_that_of_the_small_batch() -> None:
    """Gradients of known covariance and a mean that is small beside it, as the paper assumes."""
    large, small, num_draws, dim = 64, 8, 4000, 3
    generator = torch.Generator().manual_seed(0)
    root = torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, -0.5, 0.7]], dtype=torch.float64)
    gradients = torch.randn(num_draws, large, dim, generator=generator, dtype=torch.float64) @ root.T + 0.05
    factors = torch.stack([sample_factors(large, small, seed) for seed in range(num_draws)])
    means = (factors[:, :, None] * gradients).mean(dim=1)
    expected = root @ root.T / small
    plain = torch.cov(gradients.mean(dim=1).T)
    assert torch.allclose(torch.cov(means.T), expected, atol=0.06 * float(expected.max()))
    assert torch.allclose(plain * large / small, expected, atol=0.06 * float(expected.max()))  # it was small / large
    assert torch.allclose(means.mean(dim=0), torch.full((dim,), 0.05).double(), atol=0.05)


def test_rows_pass_unchanged_and_their_gradients_are_scaled() -> None:
    rows = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    factors = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)
    passed = ScaleRows.apply(rows, factors)  # type: ignore[no-untyped-call]
    assert torch.equal(passed, rows)
    passed.square().sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, 2 * rows.detach() * factors.view(-1, 1, 1))


def test_a_gradient_of_16_bits_is_multiplied_in_more_and_stays_what_it_is() -> None:
    rows = torch.randn(64, 5, dtype=torch.bfloat16, requires_grad=True)
    factors = sample_factors(64, 16, 0).float()
    ScaleRows.apply(rows, factors).sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    assert rows.grad.dtype == torch.bfloat16
    assert torch.equal(rows.grad, factors.bfloat16()[:, None].expand(64, 5))


def test_a_loss_that_changes_the_output_in_place_is_refused() -> None:
    rows = torch.randn(4, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified inplace"):
        ScaleRows.apply(rows, torch.ones(4)).mul_(2.0)  # type: ignore[no-untyped-call]


def test_the_added_noise_fades_as_the_paper_says() -> None:
    assert annealed_sigma(0.3, 0.55, 0) == pytest.approx(0.3**0.5)
    assert annealed_sigma(0.3, 0.55, 99) ** 2 == pytest.approx(0.3 / 100**0.55)
    assert annealed_sigma(0.3, 0.0, 99) ** 2 == pytest.approx(0.3)


def whole_chunks(gradients: list[Tensor]) -> list[Chunk]:
    return [
        (gradient, number, tuple(gradient.shape), (0,) * gradient.ndim) for number, gradient in enumerate(gradients)
    ]


def test_added_noise_has_its_spread_and_depends_on_the_seed_not_on_the_layout_in_memory() -> None:
    shapes = [(8, 16, 5, 5), (7,), (400, 30)]
    plain = [torch.ones(shape) for shape in shapes]
    add_noise(whole_chunks(plain), 0.2, seed=9)
    for gradient in (plain[0], plain[2]):
        assert float(gradient.std()) == pytest.approx(0.2, rel=0.06)
        assert float(gradient.mean()) == pytest.approx(1.0, abs=5 * 0.2 / gradient.numel() ** 0.5)
    turned = [torch.ones(shape) for shape in shapes]
    turned[0] = turned[0].to(memory_format=torch.channels_last)
    add_noise(whole_chunks(turned), 0.2, seed=9)
    assert all(torch.equal(one, other) for one, other in zip(plain, turned, strict=True))
    add_noise(whole_chunks(turned), 0.2, seed=10)
    assert not torch.equal(plain[1], turned[1])
    assert (
        float(torch.corrcoef(torch.stack([plain[2].flatten(), turned[2].flatten() - plain[2].flatten()]))[0, 1]) < 0.1
    )


def test_chunks_get_the_noise_of_their_place_in_whole_gradients() -> None:
    shapes = [(6, 5), (3,), (4, 4, 2), (), (6, 5)]
    whole = [torch.ones(shape, dtype=torch.float64) for shape in shapes]
    add_noise([chunk for chunk in whole_chunks(whole) if chunk[1] != 1], 0.3, seed=4)
    assert torch.equal(whole[1], torch.ones(3, dtype=torch.float64))
    assert not torch.equal(whole[0], whole[4])  # alike, but of different numbers
    # In any order, some of them missing: what other workers hold is not drawn for.
    places = [(4, (2, 1), (3, 4)), (2, (1, 0, 1), (2, 4, 1)), (0, (6, 0), (0, 5)), (3, (), ())]
    chunks = [torch.ones(size, dtype=torch.float64) for _, _, size in places]
    given = zip(chunks, places, strict=True)
    add_noise(((chunk, number, shapes[number], offset) for chunk, (number, offset, _) in given), 0.3, seed=4)
    for chunk, (number, offset, size) in zip(chunks, places, strict=True):
        spans = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
        assert torch.equal(chunk, whole[number][spans])
