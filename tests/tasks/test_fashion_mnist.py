"""The reference job: its size, its work, its shapes and its options; no data set is needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d
from torch.utils.flop_counter import FlopCounterMode

from stormo.data.tensors import flip_and_shift
from stormo.errors import SettingError
from stormo.tasks.fashion_mnist import FashionMnist, FashionMnistOptions, training_flops
from stormo.tasks.wide_resnet import Stem, WideResNet, convolve_windows, score


def _task(**options: Any) -> FashionMnist:
    return FashionMnist(FashionMnistOptions(**options))


def _batch(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num_samples, 28, 28), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, 10, (num_samples,), generator=generator)


def test_the_network_of_the_documents_has_17_117_466_parameters() -> None:
    with torch.device("meta"):
        model = _task().model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 17_117_466


def test_one_image_costs_11_08_gflop() -> None:
    assert training_flops(10) == pytest.approx(11.08e9, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_head_takes_the_mean_and_its_gradient_keeps_the_layout(
    dtype: torch.dtype, layout: torch.memory_format
) -> None:
    features = torch.randn(8, 64, 7, 7, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    features = features.contiguous(memory_format=layout).requires_grad_() * 1
    seen: list[torch.Tensor] = []
    features.register_hook(seen.append)
    means = score(torch.nn.Identity(), features)
    means.sum().backward()
    torch.testing.assert_close(means, features.mean((2, 3)))
    torch.testing.assert_close(seen[0], torch.full_like(features, 1 / 49))
    assert seen[0].is_contiguous(memory_format=layout)


def _convolved(
    convolve: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], images: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the gradient of the weight for a gradient of the result that has no structure."""
    weight = weight.detach().requires_grad_()
    made = convolve(images, weight)
    (made * made.detach().sin()).sum().backward()
    assert weight.grad is not None
    return made, weight.grad


def _one_channel(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 1, 9, 7, dtype=torch.float64, generator=generator)
    return images.to(device), torch.randn(16, 1, 3, 3, dtype=torch.float64, generator=generator).to(device)


def test_the_first_convolution_may_be_a_product_of_matrices() -> None:
    images, weight = _one_channel("cpu")
    made, gradient = _convolved(convolve_windows, images, weight)
    expected, expected_gradient = _convolved(partial(conv2d, padding=1), images, weight)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    assert made.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_first_convolution_keeps_the_layout_on_a_gpu(layout: torch.memory_format) -> None:
    images, weight = _one_channel("cuda")
    stem = Stem().to("cuda", torch.float64).to(memory_format=layout)
    with torch.no_grad():
        stem.weight.copy_(weight)
    made = stem(images)
    torch.testing.assert_close(made, conv2d(images, weight, padding=1), rtol=1e-12, atol=1e-12)
    assert made.is_contiguous(memory_format=layout)
    with torch.autocast("cuda", torch.bfloat16):
        assert stem.float()(images.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("width", [1, 2])
def test_the_formula_of_the_work_is_what_torch_counts(width: int) -> None:
    # Backward is twice forward by convention, although nobody needs the gradient of the images.
    model = WideResNet(width, dropout=0.0).eval()
    images = torch.zeros(2, 1, 28, 28)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    assert training_flops(width) == pytest.approx(3 * counter.get_total_flops() / 2, rel=1e-12)


def test_facts_need_no_data() -> None:
    facts = _task().facts()
    assert (facts.num_train, facts.num_validation) == (60_000, 10_000)
    assert facts.train_bytes == 60_000 * (28 * 28 + 8)
    assert facts.flops_per_sample == training_flops(10)
    few = _task(train_samples=100, validation_samples=7, width=1).facts()
    assert (few.num_train, few.num_validation, few.train_bytes) == (100, 7, 100 * 792)


def test_loss_and_metrics_take_bytes_and_agree() -> None:
    task = _task(width=1, dropout=0.0)
    model, batch = task.model().eval(), _batch(6)
    assert task.loss(model, batch).requires_grad
    with torch.no_grad():
        loss, metrics = task.loss(model, batch), task.metrics(model, batch)
    assert loss.shape == ()
    assert float(metrics["loss"]) == pytest.approx(6 * float(loss), rel=1e-5)
    assert 0 <= int(metrics["accuracy"]) <= 6
    assert model(batch[0].unsqueeze(1) / 255).shape == (6, 10)


def test_pixels_reach_the_model_as_numbers_from_0_to_1() -> None:
    seen: list[torch.Tensor] = []

    class Recorder(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images)
            return images.flatten(1)[:, :10]

    images = torch.zeros(2, 28, 28, dtype=torch.uint8)
    images[0] = 255
    _task().loss(Recorder(), (images, torch.zeros(2, dtype=torch.int64)))
    assert (seen[0].shape, seen[0].dtype) == ((2, 1, 28, 28), torch.float32)
    assert (float(seen[0][0].min()), float(seen[0][1].max())) == (1.0, 0.0)


def test_label_smoothing_is_for_training_alone() -> None:
    batch = _batch(4)
    plain, smooth = _task(width=1), _task(width=1, label_smoothing=0.2)
    torch.manual_seed(0)
    model = plain.model().eval()
    with torch.no_grad():
        assert float(plain.loss(model, batch)) != float(smooth.loss(model, batch))
        assert float(plain.metrics(model, batch)["loss"]) == float(smooth.metrics(model, batch)["loss"])


def test_sixteen_bit_logits_are_reduced_in_fp32() -> None:
    task = _task(width=1)
    model = task.model().eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert task.loss(model, _batch(2)).dtype == torch.float32
        assert task.metrics(model, _batch(2))["loss"].dtype == torch.float32


def test_augmentation_is_off_unless_asked_for() -> None:
    images, labels = _batch(5)
    draws = torch.rand(5, FashionMnist.num_draws, generator=torch.Generator().manual_seed(1))
    untouched = _task().augment((images, labels), draws)
    assert torch.equal(untouched[0], images)
    changed, same_labels = _task(augment=True).augment((images, labels), draws)
    assert torch.equal(changed, flip_and_shift(images, draws, max_shift=2))
    assert changed.dtype == torch.uint8
    assert not torch.equal(changed, images)
    assert torch.equal(same_labels, labels)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"width": 0},
            "--task.width 0 was set, but 16 × 0 channels are less than one; "
            "set --task.width 10, or something from 0.0625 up.",
        ),
        (
            {"width": 1e9},
            "--task.width 1e+09 was set, but weights grow with its square, and 1000 are 17.1 M × (1000 / 10)² = 171 G "
            "of them; set --task.width 10, or something up to 1000.",
        ),
        ({"dropout": 1.0}, "--task.dropout 1 was set, but it must lie in [0, 1); set --task.dropout 0.01."),
        (
            {"label_smoothing": -0.1},
            "--task.label-smoothing -0.1 was set, but it must lie in [0, 1); set --task.label-smoothing 0.01.",
        ),
        (
            {"train_samples": 60_001},
            "--task.train-samples 60001 was set, but there are 60000; set a number from 1 to that.",
        ),
        (
            {"validation_samples": 0},
            "--task.validation-samples 0 was set, but there are 10000; set a number from 1 to that.",
        ),
    ],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        _task(**options)
    assert str(caught.value) == sentence
