"""Flips and shifts, compared with a plain loop over pixels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stormo.data.tensors import flip_and_shift


def _plain(image: Tensor, draws: list[float], max_shift: int) -> Tensor:
    """One image, pixel by pixel."""
    height, width = image.shape
    source = image.flip(1) if draws[0] < 0.5 else image
    down = int(draws[1] * (2 * max_shift + 1)) - max_shift
    right = int(draws[2] * (2 * max_shift + 1)) - max_shift
    if draws[0] < 0.5:
        right = -right  # a mirrored image is moved the other way; the draws are symmetric
    result = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            if 0 <= row + down < height and 0 <= column + right < width:
                result[row, column] = source[row + down, column + right]
    return result


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", [(5, 7), (28, 28), (1, 1)])
def test_every_image_is_what_a_loop_over_pixels_gives(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (12, *shape), generator=generator).to(dtype)
    draws = torch.rand(12, 3, generator=generator)
    changed = flip_and_shift(images, draws, max_shift=2)
    assert (changed.shape, changed.dtype) == (images.shape, dtype)
    for image, row, result in zip(images, draws.tolist(), changed, strict=True):
        torch.testing.assert_close(result, _plain(image, row, 2), rtol=0, atol=0)


def test_no_flip_and_no_shift_is_the_image_itself() -> None:
    images = torch.arange(12.0).view(1, 3, 4)
    assert torch.equal(flip_and_shift(images, torch.tensor([[0.5, 0.5, 0.5]]), max_shift=2), images)
    assert torch.equal(flip_and_shift(images, torch.tensor([[0.49, 0.5, 0.5]]), max_shift=2), images.flip(2))
    assert torch.equal(flip_and_shift(images, torch.tensor([[0.9, 0.0, 0.99]]), max_shift=0), images)


def test_shifts_reach_both_ends_equally_often() -> None:
    column = torch.zeros(5, 5)
    column[2, 2] = 1.0
    seen = set()
    for draw in (0.0, 0.2, 0.4, 0.6, 0.8, 0.999999):
        moved = flip_and_shift(column[None], torch.tensor([[0.9, draw, 0.5]]), max_shift=2)[0]
        seen.add(int(moved.nonzero()[0, 0]))
    assert seen == {0, 1, 2, 3, 4}


def test_an_image_depends_on_its_own_draws_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    images, draws = torch.rand(6, 9, 9, generator=generator), torch.rand(6, 3, generator=generator)
    together = flip_and_shift(images, draws, max_shift=2)
    apart = torch.cat([flip_and_shift(images[i : i + 1], draws[i : i + 1], max_shift=2) for i in range(6)])
    assert torch.equal(together, apart)
