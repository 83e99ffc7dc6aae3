"""The parts of the engine: what goes between stages, a backward in two halves, and a task's loss around a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.errors import SettingError
from stormo.parallel.pipeline.capture import model_inputs, with_output
from stormo.parallel.pipeline.halves import inputs_first, weights_later
from stormo.parallel.pipeline.handover import arrive, depart, describe, slots_of
from tests.parallel.pipeline import models

TYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def across(value: Any) -> tuple[Any, Any, list[Tensor]]:
    """A value that was handed over, the tie of where it arrived, and the carriers."""
    described = describe(value, "a test")
    sent = depart(described, value, torch.zeros(0, requires_grad=True), "a test")
    carriers = [carrier.detach().clone().requires_grad_() for carrier in sent]
    tie, arrived = arrive(described, carriers)
    return arrived, tie, carriers


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_and_layout_arrives_as_it_was(dtype: torch.dtype) -> None:
    numbers = torch.arange(-60, 60).reshape(2, 3, 4, 5)
    plain = numbers.to(dtype)
    for value in (
        plain,
        plain.contiguous(memory_format=torch.channels_last),
        plain.transpose(1, 3),
        plain[:, :, ::2],
        plain.sum() > 0,
    ):
        arrived, _, carriers = across({"here": (value, 3, None)})
        found, three, nothing = arrived["here"]
        assert found.dtype == value.dtype
        assert torch.equal(found, value)
        assert (three, nothing) == (3, None)
        assert all(carrier.is_contiguous() and carrier.is_floating_point() for carrier in carriers)
    arrived, _, _ = across(plain.contiguous(memory_format=torch.channels_last))
    assert arrived.is_contiguous(memory_format=torch.channels_last)


def test_every_carrier_gets_a_gradient() -> None:
    used, unused, whole = torch.randn(2, 3), torch.randn(4), torch.arange(3)
    (one, _, _), tie, carriers = across((used, unused, whole))
    one.mul_(2)  # what has arrived may be changed in place
    described = describe((one, whole), "a test")
    out = depart(described, (one, whole), tie, "a test")
    torch.autograd.backward(out, [torch.ones_like(tensor) for tensor in out])
    assert torch.equal(carriers[0].grad, torch.full((2, 3), 2.0))  # type: ignore[arg-type]
    assert torch.equal(carriers[1].grad, torch.zeros(4))  # type: ignore[arg-type]
    assert carriers[2].grad is not None


def test_what_cannot_go_over_is_told() -> None:
    with pytest.raises(SettingError, match="complex64 is in a test, but it cannot go from one worker to the next"):
        describe([torch.zeros(2, dtype=torch.complex64)], "a test")
    with pytest.raises(SettingError, match="a Linear is in a test"):
        describe([nn.Linear(1, 1)], "a test")
    # A number that was taken from the data would be that of the first micro-batch for ever.
    described = describe((torch.zeros(2), 3.0), "a test")
    with pytest.raises(SettingError, match="in another micro-batch of the same shape"):
        depart(described, (torch.zeros(2), 4.0), torch.zeros(0), "a test")
    assert len(slots_of(described)) == 1


class LateBiases(nn.Module):
    """One weight at two places, with a bias for each that comes before it in the order of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.weight, self.far = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(x, self.weight, self.one)) * self.frozen
        return F.layer_norm(F.linear(hidden, self.weight, self.two), (8,), self.far * self.far)


@pytest.mark.parametrize("kind", [models.Twice, LateBiases, lambda: models.make("gpt")[0].blocks[0]])
def test_two_halves_are_the_whole_backward(kind: Any) -> None:
    torch.manual_seed(0)
    module = kind().double()
    width = 16 if hasattr(module, "attention") else 8
    x, unused = torch.randn(3, 5, width, dtype=torch.float64), torch.randn(2)
    whole = x.clone().requires_grad_()
    module(whole).square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    part = x.clone().requires_grad_()
    loss = module(part).square().sum()
    found, rest = inputs_first([loss], None, [part, unused], list(module.parameters()))
    assert torch.equal(found[0], whole.grad)  # type: ignore[arg-type]
    assert found[1] is None
    assert all(parameter.grad is None for parameter in module.parameters())
    weights_later(rest)
    for name, parameter in module.named_parameters():
        gradient = wanted[name]
        if gradient is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-13)


class TinyTask:
    """The methods of a task that use a model."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        assert isinstance(model, models.Skipping)
        device = next(model.parameters()).device  # a habit of many
        try:
            scores = model(x.to(device), kinds=torch.zeros(len(x), dtype=torch.long))
        except Exception as error:
            raise AssertionError("a stand-in stops by something that nobody catches") from error
        return F.cross_entropy(scores, y) if model.training else scores.sum()


def test_loss_runs_around_a_stand_in() -> None:
    model, batch = models.Skipping(), (torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))
    task = TinyTask()
    args, kwargs = model_inputs(lambda stand_in: task.loss(stand_in, batch), model, "TinyTask.loss")
    assert torch.equal(args[0], batch[0])
    assert list(kwargs) == ["kinds"]
    output = model(*args, **kwargs)
    for is_training in (True, False):
        model.train(is_training)
        found = with_output(lambda stand_in: task.loss(stand_in, batch), output, model, "TinyTask.loss")
        assert torch.equal(found, task.loss(model, batch))
    found.backward()
    assert model.head.weight.grad is not None


def test_loss_that_cannot_be_in_a_pipeline_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    output = model(x)
    with pytest.raises(SettingError, match=r"T.loss was called in a pipeline, but it does not call the model"):
        model_inputs(lambda model: x.sum(), model, "T.loss")
    with pytest.raises(SettingError, match="does not call the model"):
        with_output(lambda model: x.sum(), output, model, "T.loss")
    with pytest.raises(SettingError, match="more than once"):
        with_output(lambda model: (model(x) + model(x)).sum(), output, model, "T.loss")
    with pytest.raises(SettingError, match=r"it uses 1\.bias beside the model's output"):
        with_output(lambda model: model(x).sum() + model[1].bias.norm(), output, model, "T.loss")  # type: ignore[index]
