"""The GPT: its sizes by name, its arithmetic, and that no position sees the future."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stormo.tasks.gpt import Gpt
from stormo.tasks.language_model import SIZES, Size

SMALL = Size(num_layers=2, width=32, num_heads=4, block=16)


def _model(dropout: float = 0.0) -> Gpt:
    torch.manual_seed(0)
    return Gpt(SMALL, block=SMALL.block, vocabulary=256, dropout=dropout)


@pytest.mark.parametrize("name", ["tiny", "small", "125m"])
def test_the_number_of_parameters_is_what_the_table_says(name: str) -> None:
    size = SIZES[name]
    with torch.device("meta"):
        model = Gpt(size, block=size.block, vocabulary=256)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == size.num_parameters(block=size.block, vocabulary=256)
    assert size.width % size.num_heads == 0


_WORDS = {"tiny": 1e6, "small": 10e6, "medium": 40e6}


@pytest.mark.parametrize("name", SIZES)
def test_a_name_tells_the_size(name: str) -> None:
    size = SIZES[name]
    about = _WORDS[name] if name in _WORDS else float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    tolerance = 0.1 if name in _WORDS else 0.05
    assert size.num_parameters(block=size.block, vocabulary=256) == pytest.approx(about, rel=tolerance)


def test_the_counted_operations_are_those_of_the_matrix_products() -> None:
    model = _model().eval()
    # By plain products, which the counter sees; they compute attention in full, as the convention counts it.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(5, 16, dtype=torch.int64))
    # Backward is twice forward.
    assert SMALL.training_flops(block=16, vocabulary=256) == 3 * counter.get_total_flops() / 5


def test_a_position_sees_itself_and_the_past_alone() -> None:
    model = _model().eval()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert (before[:, 10:] - after[:, 10:]).abs().amax(dim=2).min() > 0


def test_a_cut_of_the_fused_projection_gives_whole_heads() -> None:
    attention: Any = _model().blocks[0].attention
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = attention(x)
        full, out = attention.qkv.weight.clone(), attention.out.weight.clone()
        parts = []
        for half in range(2):  # two heads each, with the columns of the output that belong to them
            attention.qkv.weight = torch.nn.Parameter(full[48 * half : 48 * (half + 1)])
            attention.out.weight = torch.nn.Parameter(out[:, 16 * half : 16 * (half + 1)])
            parts.append(attention(x))
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_initialisation_follows_the_global_generator_and_the_depth() -> None:
    first, second = _model().state_dict(), _model().state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    torch.manual_seed(0)
    deep = Gpt(Size(8, 128, 4, 16), block=16, vocabulary=256)
    block: Any = deep.blocks[0]
    assert float(block.up.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(block.down.weight.detach().std()) == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert float(block.attention.out.weight.detach().std()) == pytest.approx(0.02 / math.sqrt(16), rel=0.05)


def test_dropout_is_for_training_alone() -> None:
    model = _model(dropout=0.5)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    with torch.no_grad():
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


def test_it_is_one_graph_for_the_compiler() -> None:
    model = _model()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # a break in the graph would raise
    assert torch.equal(compiled(tokens), model(tokens))


def _gradients(run: Any, model: Gpt) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    device = model.head.weight.device
    tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        scores = run(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on ARM processors without bf16
@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
)
def test_compiled_in_bf16_it_computes_the_same_by_other_products(device: str, backend: str) -> None:
    model = _model().to(device)
    loss, gradients = _gradients(model, model)
    compiled_loss, compiled = _gradients(torch.compile(model, fullgraph=True, dynamic=False, backend=backend), model)
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-3, atol=0)
    assert compiled.keys() == gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients.items():  # query, key and value in one matrix, whose rows must not be confused
        assert compiled[name].dtype == torch.float32
        assert float((compiled[name] - gradient).norm() / gradient.norm()) < 0.05, name


@pytest.mark.parametrize(
    ("precision", "expected"),
    [(None, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_the_residual_stream_is_bf16_under_autocast_to_it(precision: torch.dtype | None, expected: torch.dtype) -> None:
    model, seen = _model(), []
    for block in model.blocks:
        block.register_forward_hook(lambda *parts: seen.append(parts[2].dtype))
    with torch.autocast("cpu", precision, enabled=precision is not None):
        model(torch.zeros(1, 16, dtype=torch.int64))
    assert seen == [expected, expected]
    model.double()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 16, dtype=torch.int64))
    assert seen[2:] == [torch.float64, torch.float64]
