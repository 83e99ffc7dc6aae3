"""Time of batch norm + ReLU + dropout + residual, and of max-pooling: torch eager, torch.compile and the fused kernels.

The 13 norm layers and 2 pools are those of the reference WideResNet at batch 512 in bf16 channels_last, on CUDA.
Run: python -m benchmarks.norm_act
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.command import largest
from stormo.layers.compile_ahead import compile_ahead
from stormo.layers.max_pool import MaxPool2x2
from stormo.layers.norm_act import NormAct, fused_obstacle, plain_norm_act

Operands = tuple[Tensor, Tensor | None, Tensor | None, Tensor]  # x, residual, its bias, the output's gradient
LayerCall = Callable[[NormAct, Tensor, Tensor | None, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kind of layer and how many of it the network has."""

    num_channels: int
    side: int
    num_layers: int
    dropout: float = 0.0
    has_residual: bool = False
    has_residual_bias: bool = False

    @property
    def name(self) -> str:
        """The layer in words."""
        extra = "dropout" if self.dropout else "residual" if self.has_residual else ""
        return f"{self.num_channels:>4} x {self.side:>2}² {extra}{' + bias' if self.has_residual_bias else ''}"

    def least_bytes(self, batch_size: int) -> int:
        """Traffic that two-pass batch norm cannot avoid: forward reads x twice, backward x and the gradient twice."""
        num_passes = 8 + self.has_residual
        return num_passes * 2 * batch_size * self.num_channels * self.side**2  # 2 bytes a bf16 value


CASES = (
    Case(num_channels=16, side=28, num_layers=1),
    *(
        case
        for num_channels, side in ((160, 28), (320, 14), (640, 7))
        for case in (
            Case(num_channels=num_channels, side=side, num_layers=2, dropout=0.01),
            Case(num_channels=num_channels, side=side, num_layers=1, has_residual=True),
            Case(num_channels=num_channels, side=side, num_layers=1, has_residual=True, has_residual_bias=True),
        )
    ),
)
POOLS = ((160, 28), (320, 14))  # channels and side of the input


def plain(layer: NormAct, x: Tensor, residual: Tensor | None, residual_bias: Tensor | None) -> Tensor:
    """The layer as torch operations, on any device."""
    layer.num_batches_tracked.add_(1)
    return plain_norm_act(
        x,
        residual,
        layer.weight,
        layer.bias,
        layer.running_mean,
        layer.running_var,
        training=True,
        momentum=layer.momentum,
        eps=layer.eps,
        dropout=layer.dropout,
        activation=layer.activation,
        residual_bias=residual_bias,
    )


def fused(layer: NormAct, x: Tensor, residual: Tensor | None, residual_bias: Tensor | None) -> Tensor:
    """The layer as the network calls it."""
    y: Tensor = layer(x, residual, residual_bias)
    return y


def images(batch_size: int, num_channels: int, side: int) -> Tensor:
    """Random values in bf16 and channels_last."""
    values = torch.randn(batch_size, num_channels, side, side, device="cuda", dtype=torch.bfloat16)
    return values.contiguous(memory_format=torch.channels_last)


def tensors(case: Case, batch_size: int) -> Operands:
    """Random input, residual, bias and gradient."""

    def one() -> Tensor:
        return images(batch_size, case.num_channels, case.side)

    x = (one() + 0.5).requires_grad_()
    # The residual takes no gradient here: a leaf would copy what is the incoming gradient itself in a network.
    bias = torch.randn(case.num_channels, device="cuda").requires_grad_() if case.has_residual_bias else None
    return x, one() if case.has_residual else None, bias, one()


def median_ms(step: Callable[[int], None], num_repeats: int) -> float:
    """Median device time of a step, which gets its number to take other tensors than the one before."""
    for index in range(6):
        step(index)
    torch.cuda.synchronize()
    # The device is kept busy while the host queues the steps, so that launch overhead is not in the figure.
    torch.cuda._sleep(100_000_000)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_repeats + 1)]
    marks[0].record()
    for index in range(num_repeats):
        step(index)
        marks[index + 1].record()
    torch.cuda.synchronize()
    return float(statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(marks)))


def layer_ms(call: LayerCall, case: Case, batch_size: int, num_repeats: int) -> float:
    """Forward and backward of a layer, with three sets of tensors in turn so that no cache holds them."""
    layer = NormAct(case.num_channels, dropout=case.dropout).cuda()
    sets = [tensors(case, batch_size) for _ in range(3)]

    def step(index: int) -> None:
        x, residual, residual_bias, grad = sets[index % len(sets)]
        for leaf in (x, layer.weight, layer.bias, residual_bias):
            if leaf is not None:
                leaf.grad = None
        call(layer, x, residual, residual_bias).backward(grad)

    return median_ms(step, num_repeats)


def pool_ms(call: Callable[[Tensor], Tensor], num_channels: int, side: int, batch_size: int, num_repeats: int) -> float:
    """Forward and backward of a 2×2 max-pool."""
    sets = [images(batch_size, num_channels, side).relu_().requires_grad_() for _ in range(3)]
    grads = [images(batch_size, num_channels, side // 2) for _ in range(3)]

    def step(index: int) -> None:
        x = sets[index % 3]
        x.grad = None
        call(x).backward(grads[index % 3])

    return median_ms(step, num_repeats)


def check_pool(num_channels: int, side: int, batch_size: int) -> None:
    """Both pools must agree in every bit, on values with many ties (zeros after a ReLU)."""
    x, grad = images(batch_size, num_channels, side).relu_(), images(batch_size, num_channels, side // 2)
    own, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    if not MaxPool2x2().is_fused(own):
        sys.exit("The pool did not take the fused kernels; their result cannot be checked.")
    y, expected = MaxPool2x2()(own), F.max_pool2d(theirs, 2)
    y.backward(grad)
    expected.backward(grad)
    assert own.grad is not None
    assert theirs.grad is not None
    if not (torch.equal(y, expected) and torch.equal(own.grad, theirs.grad)):
        sys.exit(f"The fused max-pool of {num_channels} channels and {side}² differs from torch's.")


def relative_error(case: Case, batch_size: int) -> float:
    """The largest norm-wise error of the fused output and gradients against float64, without the random mask."""
    layer = NormAct(case.num_channels).cuda()
    with torch.no_grad():
        layer.weight.normal_(1.0, 0.3)
        layer.bias.normal_(0.0, 0.3)
    x, residual, residual_bias, grad = tensors(case, batch_size)
    if residual is not None:
        residual.requires_grad_()
    if not layer.is_fused(x):
        sys.exit("The layer did not take the fused kernels; their result cannot be checked.")
    wide = NormAct(case.num_channels).cuda().double()
    wide.load_state_dict(layer.state_dict())
    y = layer(x, residual, residual_bias)
    y.backward(grad)
    wide_x = x.detach().double().requires_grad_()
    wide_bias = None if residual_bias is None else residual_bias.detach().double().requires_grad_()
    wide_y = plain(wide, wide_x, None if residual is None else residual.detach().double(), wide_bias)
    wide_y.backward(grad.double())
    pairs = [
        (y, wide_y),
        (x.grad, wide_x.grad),
        (layer.weight.grad, wide.weight.grad),
        (layer.bias.grad, wide.bias.grad),
        (layer.running_mean, wide.running_mean),
        (layer.running_var, wide.running_var),
    ]
    if residual_bias is not None and wide_bias is not None:
        pairs.append((residual_bias.grad, wide_bias.grad))
    errors = []
    for actual, expected in pairs:
        assert actual is not None
        assert expected is not None
        errors.append(((actual.double() - expected).norm() / expected.norm()).item())
    if residual is not None:
        assert residual.grad is not None
        errors.append(((residual.grad.double() - grad.double()).norm() / grad.double().norm()).item())
    return largest(errors)


def compare(batch_size: int, num_repeats: int, device: torch.device) -> None:
    """Prints a table and one line of totals."""
    layers = nn.ModuleList(NormAct(case.num_channels, dropout=case.dropout) for case in CASES)
    began_s = time.perf_counter()
    num_kernels, obstacle = compile_ahead(layers.append(MaxPool2x2()).cuda(), torch.bfloat16, device)
    ahead_s = time.perf_counter() - began_s
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {batch_size}, bf16 channels_last")
    print(f"compiled ahead: {num_kernels} kernels in {ahead_s:.2f} s", obstacle or "")
    began_s = time.perf_counter()
    errors = [relative_error(case, batch_size) for case in CASES]
    for num_channels, side in POOLS:
        check_pool(num_channels, side, batch_size)
    torch.cuda.synchronize()
    print(f"first calls and checks of the fused kernels: {time.perf_counter() - began_s:.1f} s")

    columns = f"{'eager ms':>9} {'compiled ms':>11} {'fused ms':>9} {'fused GB/s':>10}"
    print(f"{'forward + backward, a layer':<30} {columns}")
    eager_ms = compiled_ms = fused_ms = compile_s = 0.0
    total_bytes = 0
    for case in CASES:
        eager = layer_ms(plain, case, batch_size, num_repeats)
        own = layer_ms(fused, case, batch_size, num_repeats)
        torch._dynamo.reset()  # each kind of layer is compiled for itself, never for a range of shapes
        compiled = torch.compile(plain, dynamic=False)
        began_s = time.perf_counter()
        layer_ms(compiled, case, batch_size, 1)
        compile_s += time.perf_counter() - began_s
        theirs = layer_ms(compiled, case, batch_size, num_repeats)
        eager_ms += case.num_layers * eager
        compiled_ms += case.num_layers * theirs
        fused_ms += case.num_layers * own
        num_bytes = case.least_bytes(batch_size)
        total_bytes += case.num_layers * num_bytes
        print(f"{case.name:<30} {eager:9.3f} {theirs:11.3f} {own:9.3f} {num_bytes / own / 1e6:10.0f}", flush=True)
    rate = total_bytes / fused_ms / 1e6
    print(f"{'all 13 layers':<30} {eager_ms:9.3f} {compiled_ms:11.3f} {fused_ms:9.3f} {rate:10.0f}")
    print(f"first calls of torch.compile: {compile_s:.1f} s")
    pool_eager_ms = pool_fused_ms = 0.0
    for num_channels, side in POOLS:
        eager = pool_ms(lambda x: F.max_pool2d(x, 2), num_channels, side, batch_size, num_repeats)
        own = pool_ms(MaxPool2x2(), num_channels, side, batch_size, num_repeats)
        pool_eager_ms += eager
        pool_fused_ms += own
        # An output value: four bf16 of x, one of y, a byte of index, each way.
        num_bytes = 2 * 11 * batch_size * num_channels * (side // 2) ** 2
        name = f"{num_channels:>4} x {side:>2}² max-pool"
        print(f"{name:<30} {eager:9.3f} {'':>11} {own:9.3f} {num_bytes / own / 1e6:10.0f}")
    print(
        f"RESULT fused_ms={fused_ms:.3f} eager_ms={eager_ms:.3f} compiled_ms={compiled_ms:.3f} "
        f"max_relative_error={largest(errors):.2e} pool_fused_ms={pool_fused_ms:.3f} pool_eager_ms={pool_eager_ms:.3f}"
    )


def main() -> None:
    """Compare on this GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark measures CUDA kernels and there is no CUDA device; run it on a machine with one.")
    device = torch.device("cuda", torch.cuda.current_device())
    obstacle = fused_obstacle(device)
    if obstacle is not None:
        sys.exit(f"There is nothing to compare: {obstacle}.")
    torch.manual_seed(0)
    compare(arguments.batch_size, arguments.repeats, device)


if __name__ == "__main__":
    main()
