"""Optimizer state and random state go through a checkpoint, and training resumes bit for bit."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from stormo.checkpoint import (
    RetentionPolicy,
    Snapshot,
    collect_random_state,
    flatten_optimizer,
    load,
    restore_optimizer,
    restore_random_state,
    save,
)
from stormo.checkpoint.state import OptimizerStateError
from stormo.errors import StormoError


class Counting(optim.Optimizer):
    """Momentum with its state in every kind that can be stored."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(count=2**53 + 1, rate=0.1, first=True, buffer=None)
            state["buffer"] = parameter.grad.clone() if state["first"] else state["buffer"] + parameter.grad
            parameter.sub_(state["rate"] / (state["count"] - 2**53) * state["buffer"])
            state["count"] += 1
            state["first"] = False
            state["rate"] *= 0.9
            state["unused"] = None


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "adamw": optim.AdamW,
    "adamw fused": lambda p: optim.AdamW(p, fused=True),
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": optim.Rprop,
    "adafactor": optim.Adafactor,
    "python numbers": Counting,
}


def make_model(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    return model.to(device=device, memory_format=torch.channels_last)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(4, 3, 8, 8, generator=generator).to(next(model.parameters()).device)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def names_of(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def through_a_file(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> Snapshot:
    snapshot = Snapshot(model=model.state_dict(), optimizer=tensors, ranks={}, state={})
    saved = save(folder, snapshot, RetentionPolicy(step=1, identity="", keep_last=1))
    return load(saved.path)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_training_resumes_bit_for_bit(kind: str, steps_before: int, tmp_path: Path) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, range(steps_before))
    stored = through_a_file(model, flatten_optimizer(optimizer, names_of(model)), tmp_path)

    resumed = make_model()
    resumed.load_state_dict(stored.model)
    resumed_optimizer = OPTIMIZERS[kind](resumed.parameters())
    restore_optimizer(resumed_optimizer, names_of(resumed), stored.optimizer)
    for old, new in zip(optimizer.state.values(), resumed_optimizer.state.values(), strict=True):
        assert old.keys() == new.keys()
        for key, value in old.items():
            assert type(new[key]) is type(value)
            if isinstance(value, Tensor):
                assert (new[key].dtype, new[key].device) == (value.dtype, value.device)

    train(model, optimizer, range(steps_before, steps_before + 4))
    train(resumed, resumed_optimizer, range(steps_before, steps_before + 4))
    for left, right in zip(model.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(left, right)


def test_the_names_say_parameter_key_and_kind() -> None:
    parameter, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = Counting([parameter, idle])
    optimizer.state[parameter] = {"count": 7, "rate": 0.5, "first": True, "buffer": torch.ones(2), "unused": None}
    tensors = flatten_optimizer(optimizer, {parameter: "w", idle: "idle"})
    assert set(tensors) == {"w|count=number", "w|rate=number", "w|first=number", "w|buffer", "w|unused=none", "idle|"}
    assert tensors["w|count=number"].dtype == torch.int64
    assert tensors["w|rate=number"].dtype == torch.float64
    assert idle not in optimizer.state


def test_state_takes_the_layout_of_its_parameter_and_keeps_its_own_dtype() -> None:
    model = make_model().bfloat16()
    optimizer = optim.SGD(model.parameters(), momentum=0.9)
    weight = model[0].weight
    restore_optimizer(
        optimizer,
        names_of(model),
        {f"{n}|momentum_buffer": torch.randn(p.shape, dtype=torch.float32) for n, p in model.named_parameters()},
    )
    buffer = optimizer.state[weight]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    assert buffer.stride() == weight.stride() != torch.empty(weight.shape).stride()
    assert not buffer.requires_grad


def test_restored_state_shares_no_memory_with_what_was_loaded() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.Adam([parameter])
    tensors = {"w|exp_avg": torch.zeros(2), "w|exp_avg_sq": torch.zeros(2), "w|step": torch.tensor(3.0)}
    kept = copy.deepcopy(tensors)
    restore_optimizer(optimizer, {parameter: "w"}, tensors)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)


def test_a_parameter_name_may_contain_the_separator() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([parameter], momentum=0.9)
    optimizer.state[parameter] = {"momentum_buffer": torch.full((2,), 5.0)}
    tensors = flatten_optimizer(optimizer, {parameter: "odd|name=x"})
    fresh = optim.SGD([parameter], momentum=0.9)
    restore_optimizer(fresh, {parameter: "odd|name=x"}, tensors)
    assert torch.equal(fresh.state[parameter]["momentum_buffer"], torch.full((2,), 5.0))


@pytest.mark.parametrize(
    ("tensors", "names", "words"),
    [
        ({"a|": torch.empty(0), "z|m": torch.ones(2), "b|": torch.empty(0)}, ["a", "b"], "is for z, which"),
        ({"a|m": torch.ones(2)}, ["a", "b"], "has nothing for b"),
        ({"a": torch.ones(2), "b|": torch.empty(0)}, ["a", "b"], "'a' is not named parameter"),
        ({"a|m=pickle": torch.ones(2), "b|": torch.empty(0)}, ["a", "b"], "not named"),
        ({}, ["a"], "The optimizer has 2 parameters, of which the model lacks 1"),
    ],
)
def test_names_that_do_not_fit_change_nothing(tensors: dict[str, Tensor], names: list[str], words: str) -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = optim.SGD(parameters, momentum=0.9)
    optimizer.state[parameters[0]] = {"m": torch.full((2,), 9.0)}
    with pytest.raises(OptimizerStateError, match=words):
        restore_optimizer(optimizer, dict(zip(parameters, names, strict=False)), tensors)
    assert torch.equal(optimizer.state[parameters[0]]["m"], torch.full((2,), 9.0))


def test_stateless_in_the_file_means_stateless_after_the_restore() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([parameter], momentum=0.9)
    optimizer.state[parameter] = {"momentum_buffer": torch.ones(2)}
    restore_optimizer(optimizer, {parameter: "w"}, {"w|": torch.empty(0, dtype=torch.uint8)})
    assert parameter not in optimizer.state


def test_an_optimizer_with_lists_in_its_state_is_refused_by_name() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.LBFGS([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step(lambda: parameter.square().sum())
    with pytest.raises(OptimizerStateError, match=r"of w is a .*; LBFGS cannot be checkpointed"):
        flatten_optimizer(optimizer, {parameter: "w"})


def test_a_state_key_that_would_be_misread_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([parameter])
    for key in ("a|b", "a=number", "", 3):
        optimizer.state[parameter] = {key: torch.ones(2)}
        with pytest.raises(OptimizerStateError, match="cannot be stored as a name"):
            flatten_optimizer(optimizer, {parameter: "w"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fused", [False, True])
def test_state_from_a_cpu_run_goes_where_a_cuda_run_expects_it(fused: bool) -> None:
    on_cpu = make_model()
    optimizer = optim.AdamW(on_cpu.parameters())
    train(on_cpu, optimizer, range(2))
    tensors = flatten_optimizer(optimizer, names_of(on_cpu))

    model = make_model("cuda")
    moved = optim.AdamW(model.parameters(), fused=fused)
    restore_optimizer(moved, names_of(model), tensors)
    for state in moved.state.values():
        assert state["step"].device.type == ("cuda" if fused else "cpu")
        assert state["step"].dtype == torch.float32
        assert state["exp_avg"].device.type == "cuda"
    train(model, moved, range(2, 4))
    assert next(iter(moved.state.values()))["step"].item() == 4


# --- random state ---


def draw() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(20).tolist(),
        torch.randperm(50).tolist(),
    ]


@pytest.fixture
def _leave_the_generators_alone() -> Any:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


@pytest.mark.usefixtures("_leave_the_generators_alone")
@pytest.mark.parametrize("num_draws_before", [0, 1, 2])  # odd: the second half of a Gaussian pair is pending
def test_the_next_numbers_are_the_same_after_a_restore(num_draws_before: int) -> None:
    for _ in range(num_draws_before):
        draw()
    tensors, values = collect_random_state()
    expected = draw()
    draw()
    restore_random_state(tensors, json.loads(json.dumps(values)))
    assert draw() == expected


@pytest.mark.usefixtures("_leave_the_generators_alone")
def test_collecting_changes_nothing() -> None:
    tensors, values = collect_random_state()
    expected = draw()
    restore_random_state(tensors, values)
    collect_random_state()
    assert draw() == expected


@pytest.mark.usefixtures("_leave_the_generators_alone")
def test_what_was_collected_does_not_follow_the_generator() -> None:
    tensors, _ = collect_random_state()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    draw()
    assert all(torch.equal(tensors[name], before[name]) for name in before)


@pytest.mark.usefixtures("_leave_the_generators_alone")
@pytest.mark.parametrize("name", ["torch_rng", "python_rng", "numpy_rng"])
def test_a_missing_or_short_state_is_reported(name: str) -> None:
    tensors, values = collect_random_state()
    short = {**tensors, name: tensors[name][:5]}
    with pytest.raises(StormoError, match="cannot be restored"):
        restore_random_state(short, values)
    del tensors[name]
    with pytest.raises(StormoError, match=f"has no '{name}'"):
        restore_random_state(tensors, values)


@pytest.mark.usefixtures("_leave_the_generators_alone")
@pytest.mark.parametrize("position", [-1, 625, 10**9])
def test_a_position_outside_of_numpys_memory_is_refused(position: int) -> None:
    tensors, values = collect_random_state()
    values["numpy"]["position"] = position
    with pytest.raises(StormoError, match="624 words"):
        restore_random_state(tensors, values)


@pytest.mark.usefixtures("_leave_the_generators_alone")
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_cuda_state_is_left_out_where_there_is_no_such_device() -> None:
    tensors, values = collect_random_state()
    assert "cuda_rng" not in tensors
    tensors["cuda_rng"] = torch.zeros(16, dtype=torch.uint8)
    expected = draw()
    restore_random_state(tensors, values)
    assert draw() == expected


@pytest.mark.usefixtures("_leave_the_generators_alone")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_cuda_generator_resumes_where_it_was() -> None:
    torch.cuda.init()
    torch.rand(7, device="cuda")
    tensors, values = collect_random_state()
    assert tensors["cuda_rng"].device.type == "cpu"
    expected = torch.rand(7, device="cuda")
    torch.rand(7, device="cuda")
    restore_random_state(tensors, values)
    assert torch.equal(torch.rand(7, device="cuda"), expected)
