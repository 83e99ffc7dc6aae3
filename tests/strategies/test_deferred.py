"""Models built without memory: every value is bit for bit that of a model built in memory."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from stormo.strategies.deferred import CannotDeferError, Deferred, deferred_model
from stormo.tasks.gpt import Gpt
from stormo.tasks.gpt_sizes import Size
from stormo.tasks.wide_resnet import WideResNet

Make = Callable[[], nn.Module]


def with_parameters(**values: Tensor) -> nn.Module:
    model = nn.Module()
    for name, value in values.items():
        model.register_parameter(name, nn.Parameter(value))
    return model


def own_initialisation() -> nn.Module:
    model = nn.Sequential(nn.Linear(30, 50), nn.Conv2d(4, 6, 3), nn.Linear(50, 50))
    nn.init.orthogonal_(model[0].weight)
    nn.init.trunc_normal_(model[0].bias, std=0.02)
    nn.init.dirac_(model[1].weight)
    nn.init.sparse_(model[2].weight, 0.3)
    model[2].weight.data[:2] = 0
    model[2].weight.data[model[2].weight.data > 0.01] = 0.5
    nn.init.normal_(model[2].weight[3:5].T)
    with torch.no_grad():
        model[2].bias.copy_(model[2].weight.sum(0) + torch.arange(50))
    return model


def drawn_and_computed() -> nn.Module:
    own = torch.Generator().manual_seed(3)
    order = torch.randperm(40)
    model = with_parameters(
        scaled=torch.randn(30, 30) * 0.02,
        drawn=torch.randn(20, generator=own) + torch.rand(20, generator=own),
        chosen=torch.bernoulli(torch.rand(50)),
        picked=torch.multinomial(torch.rand(10), 5).float(),
        spectral=torch.randn(4, dtype=torch.cfloat).conj() * 2,
        masked=torch.randn(40)[order > 20].clone(),
        rows=torch.empty(6, 4).uniform_(-1, 1).t()[1:].clone(),
        base=torch.linalg.qr(torch.randn(8, 8))[0].normal_(),
    )
    with torch.random.fork_rng():
        torch.manual_seed(9)
        model.register_buffer("fixed", torch.rand(4))
    model.register_parameter("after", nn.Parameter(torch.rand(4)))
    return model


def slices_of_one() -> nn.Module:
    flat = torch.empty(1000).normal_()
    model = with_parameters(first=flat[:400].view(20, 20), second=flat[400:900].view(10, 50))
    model.register_buffer("mask", torch.ones(5, 5).tril().view(1, 1, 5, 5), persistent=False)
    flat.mul_(0.1)  # both see it
    return model


def python_asks() -> nn.Module:
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]
    model = nn.Linear(16, 16)
    assert model.weight.device == torch.device("cpu")
    assert not model.weight.is_meta
    if model.weight.sum() > 0:
        model.weight.data.mul_(-1)
    model.weight.data.cpu()[0] = rates[3]  # .cpu() is the tensor itself
    model.weight.data.to("cpu", torch.float64)[1] = 7  # and this is a copy
    scale = float(np.linalg.norm(model.weight.detach().numpy())) + len(f"{model.bias.sum():.3f} {model.bias.tolist()}")
    model.register_parameter("scale", nn.Parameter(torch.full((3,), scale)))
    return model


def from_outside() -> nn.Module:
    model = nn.Linear(4, 4)
    array = np.random.RandomState(0).randn(4, 4)
    model.weight.data = torch.from_numpy(array.astype(np.float32))
    with torch.no_grad():
        model.bias.copy_(torch.from_numpy(array[0]))
    array[:] = 0
    shared = nn.Parameter(torch.from_numpy(array))
    array[:] = 3
    model.register_parameter("shared", shared)
    model.register_parameter("again", shared)
    model.register_buffer("none", torch.empty(0))
    return model


def tried_out() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten())
    num_features = model(torch.rand(2, 1, 8, 8)).shape[1]  # moves the running statistics
    return model.append(nn.Linear(num_features, 3)).to(torch.bfloat16)


def copied() -> nn.Module:
    first = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    second = copy.deepcopy(first)
    with torch.no_grad():
        second[0].weight.mul_(0.5).add_(first[0].weight)
        first[0].weight.zero_()
        first[1].running_mean.fill_(2)
    return nn.ModuleList([first, second])


def tied() -> nn.Module:
    model = nn.ModuleDict({"tokens": nn.Embedding(10, 4, padding_idx=1), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["tokens"].weight
    return model


def legacy() -> nn.Module:
    model = with_parameters(a=torch.Tensor(30, 4), b=torch.FloatTensor(3).fill_(2), c=torch.Tensor([1, 2]))
    nn.init.kaiming_uniform_(model.a, a=math.sqrt(5))
    model.register_parameter("d", nn.Parameter(model.a.data.new(5).zero_()))
    return model


MODELS: dict[str, Make] = {
    "gpt": lambda: Gpt(Size(2, 32, 2, 16), block=16, vocabulary=50),
    "wide_resnet": lambda: WideResNet(width=0.5),
    "lstm": lambda: nn.LSTM(30, 40, 2, bidirectional=True),
    "transformer": lambda: nn.Transformer(32, 4, 2, 1, 64, batch_first=True),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(30, 20)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(30, 20)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(30, 20)),
    "channels last": lambda: nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}
for _make in (own_initialisation, drawn_and_computed, slices_of_one, python_asks, from_outside):
    MODELS[_make.__name__] = _make
for _make in (tried_out, copied, tied, legacy):
    MODELS[_make.__name__] = _make


def tensors(model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named.items()}


def bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def both(make: Make, seed: int = 1) -> tuple[nn.Module, Deferred]:
    torch.manual_seed(seed)
    plain, state = make(), torch.get_rng_state()
    torch.manual_seed(seed)
    deferred = deferred_model(make)
    assert torch.equal(torch.get_rng_state(), state)
    return plain, deferred


def assert_equal(plain: nn.Module, deferred: Deferred) -> None:
    assert deferred.names == list(tensors(plain))
    state = torch.get_rng_state()
    for name, expected in tensors(plain).items():
        value, blank = deferred.value(name), tensors(deferred.module)[name]
        assert torch.equal(bits(value), bits(expected)), name
        for tensor in (value, blank):
            assert (tensor.dtype, tensor.shape, tensor.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert blank.is_meta
        assert not value.is_meta
    assert torch.equal(torch.get_rng_state(), state)
    twins = zip(plain.named_parameters(), deferred.module.named_parameters(), strict=True)
    for (name, one), (other_name, other) in twins:  # those that are tied come once
        assert (name, one.requires_grad) == (other_name, other.requires_grad)


@pytest.mark.parametrize("name", MODELS)
def test_every_value_is_that_of_plain_construction(name: str) -> None:
    assert_equal(*both(MODELS[name]))


@pytest.mark.parametrize("name", ["own_initialisation", "drawn_and_computed", "gpt"])
def test_in_double_precision(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    plain, deferred = both(MODELS[name])
    torch.set_default_dtype(torch.float32)
    assert_equal(plain, deferred)
    assert any(tensor.dtype == torch.float64 for tensor in tensors(plain).values())


def random_program(seed: int) -> Make:
    """Views, writes into them, draws and questions, in any order."""

    def make() -> nn.Module:
        choose = random.Random(seed)
        made = [torch.zeros(4, 6)]
        for _ in range(choose.randint(5, 30)):
            one, other, number = choose.choice(made), choose.choice(made), choose.random()
            actions: list[Callable[[], object]] = [
                lambda: made.append(torch.randn(4, 6)),
                lambda one=one: made.append(one[1:3]),
                lambda one=one: made.append(one.t()),
                lambda one=one: made.append(one.reshape(-1)[: one.numel() // 2]),
                lambda one=one, other=other: made.append(one * other),
                lambda one=one: made.append(torch.bernoulli(one.sigmoid())),
                lambda one=one: made.append(one.data),
                lambda one=one: one.normal_(0, 0.5),
                lambda one=one, number=number: one[-1].fill_(number),
                lambda one=one, other=other: one.copy_(other),
                lambda one=one, other=other: one.add_(other, alpha=0.3),
                lambda one=one, number=number: one.__setitem__(one > 0.2, number),
                lambda one=one: one.mul_(-1) if one.sum() > 0 else None,
            ]
            with suppress(RuntimeError, IndexError):  # shapes that do not go together
                choose.choice(actions)()
        model = nn.Module()
        for number, tensor in enumerate(made):
            model.register_buffer(f"buffer{number}", tensor)
        return model

    return make


def test_random_programs() -> None:
    for seed in range(12):
        plain, deferred = both(random_program(seed), seed)
        assert_equal(plain, deferred)
        together = deferred.values(deferred.names)
        assert all(torch.equal(together[name], value) for name, value in tensors(plain).items())


_cache: list[Tensor] = []


class Rotary(nn.Module):
    """Keeps tensors that are neither parameters nor buffers, in places where a search would not look."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        angles = torch.outer(torch.arange(5.0), torch.rand(8))
        self.table = {"cos": [angles.cos()[None]], "sin": angles.sin()}
        self.extra = [nn.Parameter(torch.randn(8))]
        _cache[:] = [angles]
        self.turn = lambda x: x * self.table["cos"][0] + angles

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.turn(x)) + self.table["sin"] * self.extra[0] + _cache[0]


def test_other_tensors_are_real_and_the_filled_model_computes() -> None:
    plain, deferred = both(Rotary)
    expected = plain(torch.ones(5, 8))
    model = deferred.module.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(deferred.value(name))
    assert isinstance(model.extra[0], nn.Parameter)
    assert torch.equal(model(torch.ones(5, 8)), expected)


class Swallows(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        try:
            self.weight.data_ptr()
        except Exception:
            self.bias.data.zero_()


def keeps_a_view() -> nn.Module:
    model = nn.Linear(4, 4)
    model.first_row = model.weight.data[0]  # type: ignore[assignment]
    return model


def writes_by_numpy() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.detach().numpy()[:] = np.random.rand(4, 4)
    return model


def writes_after_numpy() -> nn.Module:
    model = nn.Linear(4, 4)
    array = model.weight.detach().numpy()
    model.weight.data.mul_(2)
    return with_parameters(total=torch.tensor(array.sum()))


def sparse() -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("edges", torch.eye(3).to_sparse())
    return model


def fails() -> nn.Module:
    torch.rand(random.randrange(5) + 1)
    raise KeyError("depth")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Swallows, "asks for the memory"),
        (keeps_a_view, "beside weight that shares its memory"),
        (writes_by_numpy, "ValueError"),
        (writes_after_numpy, "after numpy"),
        (sparse, "not a plain array"),
        (lambda: nn.LazyLinear(3), "weight gets its shape"),
        (lambda: nn.Linear(2, 2).to("cuda:7"), "cuda:7|CUDA|NVIDIA"),
        (fails, "KeyError"),
    ],
)
def test_what_cannot_be_deferred_is_said_and_leaves_no_trace(make: Make, reason: str) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(CannotDeferError, match=reason):
        deferred_model(make)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_a_failed_attempt_leaves_no_tensor_without_memory() -> None:
    def make() -> nn.Module:
        _cache[:] = [torch.arange(4.0)]
        return Swallows()

    with pytest.raises(CannotDeferError):
        deferred_model(make)
    assert _cache[0].tolist() == [0, 1, 2, 3]


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that tensors held at once while a function ran."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        function()
    events = sorted((event.start_ns(), event.nbytes()) for event in profile.kineto_results.events() if event.nbytes())
    return max(itertools.accumulate(num_bytes for _, num_bytes in events))


def test_memory_is_that_of_the_largest_tensor() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(11)), nn.Linear(1024, 2048))
        for layer in model:
            nn.init.trunc_normal_(layer.weight, std=0.02)
        return model.append(with_parameters(chain=torch.randn(1024, 1024).mul(0.02).tanh().neg().exp()))

    deferred: list[Deferred] = []
    largest = 1024 * 2048 * 4
    assert peak_bytes(make) > 52e6  # the yardstick
    assert largest <= peak_bytes(lambda: deferred.append(deferred_model(make))) < 2 * largest

    def materialise() -> None:
        for name in deferred[0].names:
            deferred[0].value(name)

    assert largest <= peak_bytes(materialise) < 2 * largest
