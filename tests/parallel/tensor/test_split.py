"""Layers sharded over workers: the same numbers as one process, under the same names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.checkpoint import checkpoint

from stormo.distributed.parallel_dims import SubGroup
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.parallel.tensor.layers import ShardSpec, TensorParallelLayer, TensorParallelRng, draws_random
from stormo.parallel.tensor.plan import derive_plan
from stormo.parallel.tensor.split import split_tensor, unequal_gradients
from stormo.tasks.gpt import Gpt
from stormo.tasks.language_model import Size
from stormo.tasks.task import NoOptions, Task


class Planned(Task):
    """A task that says how its model is sharded, or leaves it open."""

    def __init__(self, plan: Any = None) -> None:
        super().__init__(NoOptions())
        self._plan = plan

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str] | None:
        return self._plan


class Words(nn.Module):
    """An embedding tied to the head, a pair, and a layer that takes whole inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(24, 8, padding_idx=13)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.extra = nn.Linear(8, 8)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.down(self.up(x).relu())
        return self.head(x + self.extra(x))


WORDS = {
    **{"tokens": "vocabulary", "head": "column-gathered", "up": "column", "down": "row"},
    "extra": "row-from-whole",
}


def gpt(dropout: float = 0.0) -> nn.Module:
    return Gpt(Size(2, 32, 4, 8), block=8, vocabulary=24, dropout=dropout)


def mlp() -> nn.Module:
    pair = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
    return nn.Sequential(nn.Embedding(24, 12), pair, nn.LayerNorm(12), nn.Linear(12, 24), nn.ReLU())


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "gpt": (gpt, None),
    "mlp": (mlp, None),
    "words": (Words, WORDS),
}


def group_of(world: World) -> SubGroup:
    return SubGroup(range(world.size), world.rank, torch.distributed.group.WORLD)


def fake_group(size: int, rank: int = 0) -> Any:
    """A place among workers that are not there, for what needs no word with them."""
    return SubGroup(range(size), rank, SimpleNamespace(group_name="nobody"))  # type: ignore[arg-type]


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name][0]()


def steps(model: nn.Module, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Train on fixed tokens; the first scores, and the first gradients."""
    random = torch.Generator().manual_seed(2)
    tokens = torch.randint(24, (3, 9), generator=random)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first: tuple[Tensor, dict[str, Tensor]] | None = None
    for _ in range(count):
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        cross_entropy(scores.flatten(0, 1).to(torch.get_default_dtype()), tokens[:, 1:].flatten()).backward()
        if first is None:
            first = scores.detach().clone(), {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    assert first is not None
    return first


def of(spec: ShardSpec | None, whole: Tensor, part: Tensor) -> Tensor:
    return whole if spec is None else whole.narrow(spec.dim, spec.start, part.shape[spec.dim])


def gradients(model: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [(name, parameter.grad) for name, parameter in model.named_parameters()]


def train_sharded(world: World, name: str) -> tuple[float, dict[str, Tensor], list[str]]:
    """The largest difference from one process, the parameters that are whole, and those that are not."""
    torch.set_default_dtype(torch.float64)
    plain, model = made(name), made(name)
    specs = split_tensor(model, derive_plan(Planned(MODELS[name][1]), model, world.size), group_of(world))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    (scores, grads), (sharded_scores, sharded_grads) = steps(plain, 10), steps(model, 10)
    assert not unequal_gradients(gradients(model), specs, group_of(world))
    errors = [float((sharded_scores - scores).abs().max())]
    for (parameter_name, part), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        spec, grad = specs.get(parameter_name), sharded_grads[parameter_name]
        assert spec is None or part.shape[spec.dim] * world.size == whole.shape[spec.dim] == spec.whole_size
        errors.append(float((grad - of(spec, grads[parameter_name], grad)).abs().max()))
        errors.append(float((part - of(spec, whole, part)).detach().abs().max()))
    return max(errors), {n: p.detach() for n, p in model.named_parameters() if n not in specs}, sorted(specs)


@pytest.mark.parametrize(("name", "size"), [("gpt", 4), ("mlp", 3), ("words", 4)])
def test_sharded_layers_train_as_one_process(run_ranks: Callable[..., Any], name: str, size: int) -> None:
    answers = run_ranks(train_sharded, size, name)
    assert max(error for error, _, _ in answers) < 1e-12
    _, first, specs = answers[0]
    for _, whole, _ in answers[1:]:
        assert all(torch.equal(whole[key], first[key]) for key in first)
    if name == "gpt":
        linears = ("attention.qkv", "attention.out", "up", "down")
        blocks = [f"blocks.{number}.{linear}.weight" for number in range(2) for linear in linears]
        assert specs == sorted([*blocks, "tokens.weight", "head.weight"])


def test_without_values_only_shapes_change() -> None:
    with torch.device("meta"):
        model = gpt()
    names = [name for name, _ in model.named_parameters()]
    specs = split_tensor(model, derive_plan(Planned(), model, 4), fake_group(4, 3))
    assert [name for name, _ in model.named_parameters()] == names
    assert specs["blocks.1.attention.qkv.weight"] == ShardSpec(0, 72, 96)
    assert specs["blocks.1.down.weight"] == ShardSpec(1, 96, 128)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["blocks.0.attention.qkv.weight"] == (24, 32)
    assert shapes["blocks.0.attention.out.weight"] == (32, 8)
    assert shapes["tokens.weight"] == (6, 32)
    assert shapes["positions.weight"] == (8, 32)
    assert all(parameter.is_meta for parameter in model.parameters())


class LiteralDropout(nn.Module):
    """A rate that no attribute tells of."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, 0.5, self.training)


def dropout_masks(world: World, layer: Callable[[], nn.Module]) -> tuple[Tensor, Tensor, bool, bool]:
    """Masks of whole and of sharded activations; whether they repeat with the generator, and in recomputing."""
    torch.manual_seed(5)
    model = nn.Sequential(layer(), nn.Linear(64, 64), layer(), nn.Linear(64, 64), layer())
    split_tensor(model, {"1": "column", "3": "row"}, group_of(world))
    seen: list[Tensor] = []
    for number in (0, 2, 4):
        model[number].register_forward_hook(lambda layer, inputs, output: seen.append(output.detach() == 0))
    x = torch.ones(4, 64, requires_grad=True)
    state = torch.get_rng_state()
    model(x).sum().backward()
    torch.set_rng_state(state)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    model.eval()(x)
    again = all(torch.equal(seen[number], seen[3 + number]) for number in range(3))
    # What is computed anew may end as soon as the backward pass has what it needs.
    recomputed = all(torch.equal(mask, seen[3 + number]) for number, mask in enumerate(seen[6:-3]))
    assert 1 <= len(seen[6:-3]) <= 3
    return torch.cat((seen[0], seen[2])), seen[1], again, recomputed


@pytest.mark.parametrize("layer", [nn.Dropout, LiteralDropout])
def test_dropout_differs_between_shards(run_ranks: Callable[..., Any], layer: Callable[[], nn.Module]) -> None:
    (whole, sharded, again, recomputed), (whole1, sharded1, again1, recomputed1) = run_ranks(dropout_masks, 2, layer)
    assert torch.equal(whole, whole1)
    assert not torch.equal(sharded, sharded1)
    assert 0.3 < float((sharded ^ sharded1).float().mean()) < 0.7
    assert again
    assert again1
    assert recomputed
    assert recomputed1


def test_what_may_draw_random_numbers() -> None:
    assert draws_random(LiteralDropout())
    assert draws_random(nn.Sequential(nn.RReLU()))
    assert draws_random(gpt(dropout=0.1))
    assert not draws_random(gpt())  # as switching would divide the graph of torch.compile
    assert not draws_random(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))


@pytest.mark.gpu
def test_streams_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    seen = []
    for rank in range(2):
        torch.cuda.manual_seed(3)
        rng = TensorParallelRng(rank)
        numbers = []
        for _ in range(2):
            numbers.append(torch.rand(64, device=device))
            rng.enter(device)
            rng.enter(device)
            numbers.append(torch.rand(64, device=device))
            rng.leave(device)
        seen.append([*numbers, torch.rand(64, device=device)])
    first, second = seen
    assert [torch.equal(one, other) for one, other in zip(first, second, strict=True)] == [True, False] * 2 + [True]
    assert len({tuple(numbers.tolist()) for numbers in (*first, second[1], second[3])}) == 7  # none comes twice


def train_with_dropout(world: World) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = gpt(dropout=0.2)
    specs = split_tensor(model, derive_plan(Planned(), model, world.size), group_of(world))
    steps(model, 3)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if name not in specs}


def test_with_dropout_whatever_is_whole_stays_equal(run_ranks: Callable[..., Any]) -> None:
    first, second = run_ranks(train_with_dropout, 2)
    assert "positions.weight" in first
    assert all(torch.equal(second[name], first[name]) for name in first)


def in_bf16(world: World) -> list[tuple[torch.dtype, float]]:
    """How far scores and gradients in bf16 are from those of one process, in parts of the largest."""
    found = []
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, where a processor has no bf16
        for name in ("gpt", "words"):
            plain, model = made(name), made(name)
            specs = split_tensor(model, derive_plan(Planned(MODELS[name][1]), model, world.size), group_of(world))
            (scores, grads), (sharded_scores, sharded_grads) = steps(plain, 1), steps(model, 1)
            assert sharded_scores.dtype == scores.dtype
            for key, grad in sharded_grads.items():
                whole = of(specs.get(key), grads[key], grad)
                found.append((grad.dtype, float((grad - whole).abs().max() / whole.abs().max().clamp(min=1e-6))))
    return found


def test_autocast_is_followed(run_ranks: Callable[..., Any]) -> None:
    for found in run_ranks(in_bf16, 2):
        assert {dtype for dtype, _ in found} == {torch.float32}
        assert 0 < max(error for _, error in found) < 0.05


def compiled(world: World) -> float:
    plain, model = made("words"), made("words")
    for one in (plain, model):
        split_tensor(one, WORDS, group_of(world))
        for layer in one.modules():
            if isinstance(layer, TensorParallelLayer):
                layer.rng = None  # as in a model that is known to draw no random numbers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the tracing
        model.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        (scores, grads), (compiled_scores, compiled_grads) = steps(plain, 1), steps(model, 1)
    errors = [float((compiled_grads[name] - grads[name]).abs().max()) for name in grads]
    return max(float((compiled_scores - scores).abs().max()), *errors)


def test_compiled_into_one_graph(run_ranks: Callable[..., Any]) -> None:
    assert max(run_ranks(compiled, 2)) < 1e-5


class Scaled(nn.Module):
    """A weight between a column and a row, which no worker's own gradient can be right for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.scale(self.up(x)))


def unequal(world: World) -> list[str]:
    torch.manual_seed(0)
    model = Scaled()
    specs = split_tensor(model, {"up": "column", "down": "row"}, group_of(world))
    model(torch.randn(5, 4)).square().sum().backward()
    return unequal_gradients(gradients(model), specs, group_of(world))


def test_a_weight_among_cut_activations_is_found(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(unequal, 2) == [["scale.weight"], ["scale.weight"]]


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def odd(layer: nn.Module) -> nn.Module:
    return nn.ModuleDict({"up": layer, "down": nn.Linear(8, 4), "table": nn.Embedding(8, 4, max_norm=1.0)})


PAIR = {"up": "column", "down": "row"}


@pytest.mark.parametrize(
    ("model", "plan", "size", "words"),
    [
        (gpt, None, 3, "--mesh tensor=3 was set, but blocks.0.attention.qkv has 4 heads, which 3 do not divide; "),
        (gpt, None, 3, "set tensor=2 or 4."),
        (lambda: odd(nn.Linear(4, 8)), {"up": "column:3", "down": "row"}, 2, "its 8 outputs are not 3 equal groups"),
        (lambda: odd(nn.Linear(4, 8)), {"up": "column:4", "down": "row"}, 8, "4 groups of outputs, which 8 do not"),
        (lambda: odd(nn.Linear(4, 8)), {"upp": "column"}, 2, "did you mean up? it can shard: down, table, up"),
        (lambda: odd(nn.Linear(4, 8)), {"up": "colum", "down": "row"}, 2, "did you mean column?"),
        (lambda: odd(nn.Linear(4, 8)), {"up": "column"}, 2, "no layer is named as row; name one as row"),
        (lambda: odd(nn.Linear(4, 8)), {"down": "row"}, 2, "takes sharded inputs, and no layer"),
        (lambda: odd(nn.Linear(4, 8)), {**PAIR, "u*": "row"}, 2, "names up as column and as row"),
        (lambda: odd(nn.Linear(4, 8)), {"table": "vocabulary"}, 2, "it has max_norm"),
        (lambda: odd(nn.Linear(4, 8)), ["up"], 2, "Planned.tensor_plan() is ['up'], but it maps layer paths"),
        (lambda: odd(nn.Conv2d(4, 8, 1)), PAIR, 2, "it is a Conv2d; name a plain nn.Linear"),
        (lambda: odd(OwnForward(4, 8)), PAIR, 2, "its class OwnForward overrides forward"),
        (lambda: odd(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))), PAIR, 2, "computed from other"),
        (Words, {"head": "column-gathered"}, 2, "it shares its weight with tokens, which is not sharded alike"),
        (lambda: odd(nn.Linear(4, 8)), None, 2, 'say so in Planned, as in def tensor_plan(self, model): return {"up"'),
        (lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4)), None, 2, "0 has 9 outputs, which 2"),
    ],
)
def test_refusals(model: Callable[[], nn.Module], plan: Any, size: int, words: str) -> None:
    whole = model()
    before = {name: parameter.shape for name, parameter in whole.named_parameters()}
    with pytest.raises(SettingError) as caught:
        split_tensor(whole, derive_plan(Planned(plan), whole, size), fake_group(size))
    assert words in str(caught.value)
    assert {name: parameter.shape for name, parameter in whole.named_parameters()} == before


def lookup(world: World) -> str:
    model = Words()
    split_tensor(model, WORDS, group_of(world))
    with pytest.raises(IndexError) as caught:
        model(torch.tensor([24]))
    return str(caught.value)


def test_a_token_beyond_the_table_is_refused_as_ever(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(lookup, 2) == ["index out of range in self"] * 2
