"""Parameters and optimizer state that are counted without memory are those of a real model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stormo.config.schema import Optimizer, TrainConfig
from stormo.errors import SettingError
from stormo.optim.table import OPTIMIZERS, make_optimizer
from stormo.predict.fake_tensors import FakeModel
from stormo.predict.model import count_model, pipeline_stages, tensor_sharded
from stormo.tasks.task import NoOptions, Task
from tests.predict.test_tracing import Convolutions, make


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in kept)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "sgd without momentum"])
def test_every_optimizer_has_the_state_that_it_really_has(name: str) -> None:
    task, model = Convolutions(NoOptions()), Convolutions(NoOptions()).model()
    settings = Optimizer(optimizer=name) if name in OPTIMIZERS else Optimizer(momentum=0.0)  # type: ignore[arg-type]
    optimizer = make_optimizer(model, settings)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    found = count_model(task, FakeModel(task, "fp32"), replace(TrainConfig(), optimizer=settings))
    assert found.state_bytes == state_bytes(optimizer)
    assert found.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert found.num_frozen == sum(p.numel() for p in model.parameters() if not p.requires_grad) > 0
    assert found.num_trained + found.num_frozen == sum(parameter.numel() for parameter in model.parameters())
    assert found.buffer_bytes == sum(buffer.nbytes for buffer in model.buffers())
    assert found.notices == ()
    # Of stormo's own some compute all updates before they take one, in memory of their own.
    assert (found.step_bytes > 0) == (name in ("lars", "larc", "lamb", "novograd", "muon", "schedule-free-adamw"))


class OwnOptimizer(Convolutions):
    """It trains one weight alone, with a state of one value for each row and each column; its step reads values."""

    def optimizer(self, model: nn.Module) -> Any:
        """Factored."""
        return torch.optim.Adafactor(list(model.parameters())[-2:-1])


class NestedState(Convolutions):
    """An optimizer whose state is a list, as that of L-BFGS."""

    def optimizer(self, model: nn.Module) -> Any:
        """As the class says."""

        class Nested(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                for parameter in self.param_groups[0]["params"]:
                    self.state[parameter]["steps"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]

        return Nested([p for p in model.parameters() if p.requires_grad], lr=0.1)


class Unreadable(Convolutions):
    """An optimizer that wants other values."""

    def optimizer(self, model: nn.Module) -> Any:
        """As the class says."""

        class Picky(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                assert all(float(p.grad.sum()) < 0 for group in self.param_groups for p in group["params"])

        return Picky([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_the_optimizer_of_a_task_and_what_it_leaves_out_is_frozen() -> None:
    task = OwnOptimizer(NoOptions())
    fake_model = FakeModel(task, "fp32")
    found = count_model(task, fake_model, TrainConfig())
    assert (found.optimizer, found.num_trained) == ("Adafactor", 3 * 36)
    assert found.state_bytes == 4 * (3 + 36 + 1)  # rows, columns, and the number of steps
    nested = NestedState(NoOptions())
    found = count_model(nested, FakeModel(nested, "fp32"), TrainConfig())
    assert found.state_bytes == 2 * found.gradient_bytes
    assert [name for name, p in fake_model.model().named_parameters() if p.requires_grad] == ["5.weight"]


def test_an_optimizer_that_cannot_be_stepped_is_said_to_be_a_guess() -> None:
    task = Unreadable(NoOptions())
    found = count_model(task, FakeModel(task, "fp32"), TrainConfig())
    assert found.state_bytes == 2 * found.gradient_bytes
    assert "The state of Picky is taken as two values a parameter" in found.notices[0]


def test_a_model_that_reads_its_own_values_is_built_in_memory_first() -> None:
    class Reads(Convolutions):
        def model(self) -> nn.Module:
            model = super().model()
            assert float(model[0].weight.abs().sum()) > 0  # type: ignore[index]
            return model

    task = Reads(NoOptions())
    fake_model = FakeModel(task, "fp64")
    assert {parameter.dtype for parameter in fake_model.model().parameters()} == {torch.float64}
    assert count_model(task, fake_model, TrainConfig()).weight_bytes == 8 * sum(
        p.numel() for p in task.model().parameters()
    )
    assert len(fake_model.notices) == 1


def test_sharded_layers_and_stages_are_those_of_the_model() -> None:
    words: Task = make("words")
    model = FakeModel(words, "fp32").model()
    cut = tensor_sharded(words, model, 2)
    assert {name.split(".", 2)[-1] for name in cut if name.startswith("blocks.")} == {
        "attention.qkv.weight",
        "attention.out.weight",
        "up.weight",
        "down.weight",
    }
    with pytest.raises(SettingError, match="has 4 parts"):
        tensor_sharded(words, model, 3)
    stages = pipeline_stages(words, model, 2, 1)
    assert sorted(name for stage in stages for name in stage) == sorted(name for name, _ in model.named_parameters())
    assert all(any(name.startswith("blocks.") for name in stage) for stage in stages)
    points = make("points")
    with pytest.raises(SettingError, match="tracing"):
        pipeline_stages(points, nn.ModuleDict({"one": nn.Linear(2, 2)}), 2, 1)
