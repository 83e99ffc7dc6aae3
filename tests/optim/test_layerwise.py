"""What every layer-wise optimizer keeps to, whatever its formula."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import optimizer_exactness
from stormo.checkpoint import RetentionPolicy, Snapshot, flatten_optimizer, load, restore_optimizer, save
from stormo.errors import SettingError
from stormo.optim import LAMB, LARC, LARS, NovoGrad
from tests.optim.layers import KINDS, copies, make_layers, set_gradients, take_steps

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.mark.parametrize("case", optimizer_exactness.CASES, ids=lambda case: case.name)
def test_fifty_steps_are_those_of_the_paper(case: optimizer_exactness.Case) -> None:
    assert optimizer_exactness.difference(case, 50) <= 1e-12


@every_kind
def test_gradients_are_left_as_they_were(kind: Any) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        layers = make_layers(dtype)
        set_gradients(layers, 1)
        gradients, before = [layer.grad for layer in layers], copies([layer.grad for layer in layers])  # type: ignore[misc]
        kind(layers, lr=0.1, weight_decay=0.1).step()
        for layer, gradient, old in zip(layers, gradients, before, strict=True):
            assert layer.grad is gradient
            assert torch.equal(old, gradient)  # type: ignore[arg-type]


@every_kind
def test_biases_and_norms_are_neither_adapted_nor_decayed_by_default(kind: Any) -> None:
    for decay in (0.0, 0.5):
        layers = make_layers()
        forced = make_layers()
        take_steps(kind(layers, lr=0.1, weight_decay=decay), layers, range(3))
        groups = [{"params": forced[:2], "adapt": True}, {"params": forced[2:], "adapt": False, "weight_decay": 0.0}]
        take_steps(kind(groups, lr=0.1, weight_decay=decay), forced, range(3))
        for one, other in zip(layers, forced, strict=True):
            assert torch.equal(one, other)


@every_kind
@pytest.mark.parametrize("adapt", [True, False])
def test_adapt_of_a_group_holds_for_any_shape(kind: Any, adapt: bool) -> None:
    if kind is KINDS["muon"] and adapt:
        return  # only matrices: see test_muon
    flat, square = make_layers(shapes=[(12,)]), make_layers(shapes=[(12,)])
    matrix = nn.Parameter(square[0].detach().reshape(3, 4).clone())
    for layers in (flat, [matrix]):
        take_steps(kind(layers, lr=0.1, weight_decay=0.1, adapt=adapt), layers, range(3))
    torch.testing.assert_close(matrix.flatten(), flat[0], rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (KINDS["lars"], lambda w, g: w - 0.1 * (g + 0.5 * w)),
        (KINDS["larc"], lambda w, g: w - 0.1 * (g + 0.5 * w)),
        (KINDS["lamb"], lambda w, g: w - 0.1 * (g / (g.abs() + 1e-6) + 0.5 * w)),  # Adam's first step
        (KINDS["novograd"], lambda w, g: w - 0.1 * (g + 0.5 * w)),
    ],
)
def test_a_group_that_is_not_adapted_has_its_own_decay(kind: Any, expected: Callable[[Tensor, Tensor], Tensor]) -> None:
    layers = make_layers()
    before = copies(layers)
    take_steps(kind(layers, lr=0.1, weight_decay=0.5, adapt=False), layers, [0])
    for layer, old in zip(layers, before, strict=True):
        assert layer.grad is not None
        torch.testing.assert_close(layer.detach(), expected(old, layer.grad), rtol=1e-13, atol=1e-15)


@every_kind
@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("gradient", [0.0, 1.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [None, 0.0])
def test_zeros_make_no_infinities(kind: Any, weight: float, gradient: float, decay: float, eps: float | None) -> None:
    layer = nn.Parameter(torch.full((3, 2), weight))
    options = {} if eps is None or kind is not NovoGrad else {"eps": eps}
    optimizer = kind([layer], lr=0.1, weight_decay=decay, **options)
    for value in (gradient, 0.0, 1.0):
        layer.grad = torch.full_like(layer, value)
        optimizer.step()
        assert layer.isfinite().all()
        assert all(value.isfinite().all() for value in optimizer.state[layer].values())
    assert (layer != weight).all()


@pytest.mark.parametrize(
    ("kind", "options", "share"),
    [
        (LARS, {"trust_coefficient": 0.02}, 0.1 * 0.02),  # lr × trust × |w| / (decay × |w|) × decay
        (LARC, {"trust_coefficient": 0.02}, 0.02),  # trust / decay = 0.04 is below lr
        (LARC, {"trust_coefficient": 0.5}, 0.1 * 0.5),  # 1 is not: lr × decay
        (LAMB, {}, 0.1),  # lr × |w| / (decay × |w|) × decay
        (NovoGrad, {}, 0.1 * 0.5),  # lr × decay
    ],
)
def test_weights_decay_by_the_formula_where_the_gradient_is_zero(kind: Any, options: Any, share: float) -> None:
    layer = nn.Parameter(torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    before = layer.detach().clone()
    layer.grad = torch.zeros_like(layer)
    kind([layer], lr=0.1, weight_decay=0.5, **options).step()
    torch.testing.assert_close(layer.detach(), (1 - share) * before, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("kind", [KINDS["lars"], KINDS["larc"], KINDS["lamb"]])
def test_a_layer_of_zeros_moves_at_the_plain_rate(kind: Any) -> None:
    layer = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    layer.grad = torch.full_like(layer, 2.0)
    kind([layer], lr=0.25).step()
    step = 0.25 * (2.0 / (2.0 + 1e-6) if kind is LAMB else 2.0)
    torch.testing.assert_close(layer.detach(), torch.full_like(layer, -step), rtol=1e-13, atol=0)


@every_kind
def test_parameters_without_a_gradient_and_empty_ones_are_passed_over(kind: Any) -> None:
    layers = [*make_layers(), nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))]
    optimizer = kind(layers, lr=0.1)
    set_gradients(layers, 0)
    layers[0].grad = None
    before = copies(layers)
    optimizer.step()
    assert torch.equal(layers[0], before[0])
    assert layers[0] not in optimizer.state
    assert not torch.equal(layers[1], before[1])
    for layer in layers:
        layer.grad = None
    optimizer.step()


@every_kind
def test_a_rate_may_be_a_tensor(kind: Any) -> None:
    layers, same = make_layers(), make_layers()
    take_steps(kind(layers, lr=0.125, weight_decay=0.1), layers, range(3))
    take_steps(kind(same, lr=torch.tensor(0.125), weight_decay=0.1), same, range(3))
    for one, other in zip(layers, same, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=0)


@every_kind
def test_a_closure_is_called_with_gradients_and_its_loss_returned(kind: Any) -> None:
    (layer,) = make_layers(shapes=[(2, 2)])
    optimizer = kind([layer], lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = layer.square().sum()
        loss.backward()
        return loss

    before = layer.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx(before.square().sum().item())
    assert not torch.equal(layer, before)


@every_kind
def test_another_memory_layout_takes_the_same_steps_and_gives_it_to_the_state(kind: Any) -> None:
    shape = [(4, 3, 5, 5)]
    layers = make_layers(shapes=shape)
    last = [nn.Parameter(layer.detach().to(memory_format=torch.channels_last)) for layer in make_layers(shapes=shape)]
    optimizers = [kind(one, lr=0.1, weight_decay=0.1) for one in (layers, last)]
    for optimizer, one in zip(optimizers, (layers, last), strict=True):
        take_steps(optimizer, one, range(3))  # with gradients of the plain layout
    torch.testing.assert_close(last[0], layers[0], rtol=1e-12, atol=1e-14)
    large = [value for value in optimizers[1].state[last[0]].values() if value.ndim]
    assert large
    assert all(value.stride() == last[0].stride() != layers[0].stride() for value in large)


@every_kind
def test_several_dtypes_in_one_group_step_as_alone(kind: Any) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    alone = [make_layers(dtype) for dtype in dtypes]
    for layers in alone:
        take_steps(kind(layers, lr=0.1, weight_decay=0.1), layers, [7, 8])
    mixed = [make_layers(dtype) for dtype in dtypes]
    optimizer = kind([layer for layers in zip(*mixed, strict=True) for layer in layers], lr=0.1, weight_decay=0.1)
    for seed in (7, 8):
        for layers in mixed:
            set_gradients(layers, seed)
        optimizer.step()
    for ours, theirs in zip(mixed, alone, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_layers_are_stepped_in_float32_and_rounded_once(kind: Any, dtype: torch.dtype) -> None:
    layers, wide = make_layers(dtype), [nn.Parameter(layer.detach().float()) for layer in make_layers(dtype)]
    optimizer = kind(layers, lr=0.1, weight_decay=0.1)
    set_gradients(layers, 3, scale=1e-4)  # squares of these are no numbers of float16
    for layer, other in zip(layers, wide, strict=True):
        assert layer.grad is not None
        other.grad = layer.grad.float()
    optimizer.step()
    kind(wide, lr=0.1, weight_decay=0.1).step()
    for layer, other in zip(layers, wide, strict=True):
        assert torch.equal(layer, other.to(dtype))
        assert {value.dtype for value in optimizer.state[layer].values()} == {torch.float32}


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["torch", "file"])
def test_a_saved_state_resumes_to_the_last_bit(kind: Any, dtype: torch.dtype, way: str, tmp_path: Path) -> None:
    layers = make_layers(dtype)
    optimizer = kind(layers, lr=0.1, weight_decay=0.1)
    take_steps(optimizer, layers, range(3))
    again = [nn.Parameter(layer.detach().clone()) for layer in layers]
    resumed = kind(again, lr=0.1, weight_decay=0.1)
    names = [f"layer{index}" for index in range(len(layers))]
    if way == "torch":
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        snapshot = Snapshot(
            model={}, optimizer=flatten_optimizer(optimizer, dict(zip(layers, names, strict=True))), ranks={}, state={}
        )
        saved = save(tmp_path, snapshot, RetentionPolicy(step=1, identity="", keep_last=1))
        restore_optimizer(resumed, dict(zip(again, names, strict=True)), load(saved.path).optimizer)
    for layer, other in zip(layers, again, strict=True):
        old, new = optimizer.state[layer], resumed.state[other]
        assert old.keys() == new.keys()
        for key, value in old.items():
            assert (new[key].dtype, new[key].device) == (value.dtype, value.device)
            assert torch.equal(new[key], value)
            assert new[key].data_ptr() != value.data_ptr()
    take_steps(optimizer, layers, range(3, 6))
    take_steps(resumed, again, range(3, 6))
    for layer, other in zip(layers, again, strict=True):
        assert torch.equal(layer, other)


def test_hooks_on_loading_have_their_say() -> None:
    layers = make_layers(torch.bfloat16)
    optimizer = LARS(layers, lr=0.1)
    take_steps(optimizer, layers, [0])

    def zeros(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        entries = {key: {k: torch.zeros_like(v) for k, v in entry.items()} for key, entry in state["state"].items()}
        return {**state, "state": entries}

    optimizer.register_load_state_dict_pre_hook(zeros)
    optimizer.load_state_dict(optimizer.state_dict())
    for layer in layers:
        assert not optimizer.state[layer]["momentum_buffer"].any()
        assert optimizer.state[layer]["momentum_buffer"].dtype == torch.float32
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


@every_kind
def test_gradients_of_two_passes_add_up_to_the_step_of_one(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    same, inputs = copy.deepcopy(model), torch.randn(6, 4, dtype=torch.float64)
    optimizers = [kind(m.parameters(), lr=0.1, weight_decay=0.1) for m in (model, same)]
    for _ in range(3):
        model(inputs).square().sum().backward()
        for half in (inputs[:2], inputs[2:]):
            same(half).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@every_kind
def test_a_step_that_overflows_leaves_no_trace(kind: Any) -> None:
    layers, same = make_layers(torch.float32), make_layers(torch.float32)
    scaled, plain = kind(layers, lr=0.1, weight_decay=0.1), kind(same, lr=0.1, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100, backoff_factor=0.5)
    for seed in (None, 1, None, 2):
        set_gradients(layers, seed or 0, scale=scaler.get_scale())
        scaler.scale(torch.zeros(()))  # makes its scale
        before, state = copies(layers), copy.deepcopy(scaled.state_dict())
        if seed is None:
            assert layers[1].grad is not None
            layers[1].grad[0, 0, 0, 0] = torch.inf
        scaler.step(scaled)
        scaler.update()
        if seed is None:
            assert all(torch.equal(layer, old) for layer, old in zip(layers, before, strict=True))
            assert str(scaled.state_dict()) == str(state)
        else:
            take_steps(plain, same, [seed])
    for one, other in zip(layers, same, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [LARS, LAMB, NovoGrad])  # LARC's step is that of LARS
def test_a_compiled_step_is_the_eager_one(kind: Any) -> None:
    layers, same = make_layers(torch.float32), make_layers(torch.float32)
    compiled, eager = kind(layers, lr=0.1, weight_decay=0.1), kind(same, lr=0.1, weight_decay=0.1)
    torch._dynamo.reset()
    step = torch.compile(compiled.step, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        set_gradients(layers, seed)
        step()
        take_steps(eager, same, [seed])
    for one, other in zip(layers, same, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    for layer, other in zip(layers, same, strict=True):
        assert compiled.state[layer].keys() == eager.state[other].keys()


def test_no_compiler_is_loaded_for_a_run_that_does_not_compile() -> None:
    program = (
        "import sys\nimport torch\nfrom stormo.config import schema\n"
        "from stormo.optim.table import OPTIMIZERS, make_optimizer\n"
        "from stormo.optim.task_optimizer import make_task_optimizer\n"
        "from stormo.parallel.ddp import replica\n"
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\n"
        "for name in OPTIMIZERS:\n"
        "    model = replica(torch.nn.Linear(2, 2))\n"
        "    optimizer = make_optimizer(model, schema.Optimizer(optimizer=name))\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "for kind in (torch.optim.AdamW, torch.optim.RMSprop):\n"
        "    model, hooked = torch.nn.Linear(2, 2), []\n"
        "    optimizer = make_task_optimizer(lambda model: kind(model.parameters()), model)\n"
        "    optimizer.register_step_pre_hook(lambda *_: hooked.append(1))\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "    assert type(optimizer).__name__ == kind.__name__ and hooked == [1]\n"
        "was_loaded = 'torch._dynamo' in sys.modules\n"
        "class Heir(torch.optim.SGD):\n    def step(self):\n        super().step()\n"
        "make_task_optimizer(lambda model: Heir(model.parameters(), lr=0.1), model)\n"
        "assert 'torch._dynamo' in sys.modules, 'it would be loaded in the first step, and counted as training'\n"
        "torch._dynamo.reset()\n"  # can be had for all that
        "sys.exit(was_loaded or not replica(torch.nn.Linear(2, 2))(torch.ones(1, 2)).requires_grad)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: LARS(p, lr=-1.0), "LARS was given lr -1, but it must be at least 0 and finite; give another lr."),
        (lambda p: LARS(p, lr=1.0, momentum=1.0), "LARS was given momentum 1, but it must be in [0, 1); give another"),
        (lambda p: LARS(p, lr=1.0, momentum=0.0, nesterov=True), "nesterov=True, but its momentum is 0; give it a"),
        (lambda p: LAMB(p, lr=1.0, betas=(0.9, 1.5)), "LAMB was given betas 1.5, but it must be in [0, 1)"),
        (
            lambda p: LAMB(p, lr=1.0, norm_bounds=(2.0, 1.0)),
            "norm_bounds (2.0, 1.0), but they are a lower and an upper bound",
        ),
        (
            lambda p: LAMB([{"params": p, "norm_bounds": (2.0, 1.0)}], lr=1.0),
            "norm_bounds (2.0, 1.0), but they are a lower and an upper bound",
        ),
        (lambda p: NovoGrad(p, lr=torch.ones(2)), "lr of shape (2,), but it is one number; give a 0-dim tensor"),
        (lambda p: NovoGrad(p, lr=1.0, eps=float("nan")), "eps nan, but it must be at least 0"),
        (
            lambda p: LAMB([*p, nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=1.0),
            "LAMB was given parameters of torch.complex64, but its norms are those of real numbers; give these to",
        ),
    ],
)
def test_what_cannot_be_stepped_is_refused_in_one_sentence(make: Callable[[Any], Any], sentence: str) -> None:
    with pytest.raises(SettingError, match=re.escape(sentence)):
        make(make_layers())


@every_kind
@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"params": nn.Parameter(torch.zeros(2, dtype=torch.complex64))}])
def test_a_group_that_is_refused_is_not_kept(kind: Any, wrong: dict[str, Any]) -> None:
    layers = make_layers()
    optimizer = kind(layers[1:], lr=0.1)
    with pytest.raises(SettingError):
        optimizer.add_param_group({"params": layers[0]} | wrong)
    optimizer.add_param_group({"params": layers[0]})
    assert [group["params"] for group in optimizer.param_groups] == [layers[1:], layers[:1]]


@every_kind
def test_sparse_gradients_are_refused(kind: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(SettingError, match=r"shape \(4, 2\) has a sparse gradient.*; make the embedding with sparse=F"):
        kind(table.parameters(), lr=0.1).step()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it does not see every operation
@every_kind
def test_a_step_never_waits_for_the_device(kind: Any) -> None:
    layers = [nn.Parameter(layer.detach().cuda()) for layer in make_layers(torch.float32)]
    halves = [nn.Parameter(layer.detach().half()) for layer in layers]
    for rate in (0.1, torch.tensor(0.1), torch.tensor(0.1, device="cuda")):
        optimizer = kind([*layers, *halves], lr=rate, weight_decay=0.1)
        before = copies(layers)
        for layer in (*layers, *halves):
            layer.grad = torch.ones_like(layer)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(not torch.equal(layer, old) for layer, old in zip(layers, before, strict=True))
