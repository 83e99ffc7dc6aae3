"""Time of batch norm + ReLU + dropout + residual: torch eager, torch.compile and the fused kernels, on CUDA.

The 13 layers are those of the reference WideResNet at batch 512 in bf16 channels_last.
Run: python -m benchmarks.norm_act
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stormo.layers.norm_act import NormAct, fused_obstacle, plain_norm_act

LayerCall = Callable[[NormAct, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kind of layer and how many of it the network has."""

    num_channels: int
    side: int
    num_layers: int
    dropout: float = 0.0
    has_residual: bool = False

    @property
    def name(self) -> str:
        """The layer in words."""
        extra = "dropout" if self.dropout else "residual" if self.has_residual else ""
        return f"{self.num_channels:>4} x {self.side:>2}² {extra}"

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
            Case(num_channels=num_channels, side=side, num_layers=2, has_residual=True),
        )
    ),
)


def plain(layer: NormAct, x: Tensor, residual: Tensor | None) -> Tensor:
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
    )


def fused(layer: NormAct, x: Tensor, residual: Tensor | None) -> Tensor:
    """The layer as the network calls it."""
    y: Tensor = layer(x, residual)
    return y


def tensors(case: Case, batch_size: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Random input, residual and gradient."""
    shape = (batch_size, case.num_channels, case.side, case.side)

    def one() -> Tensor:
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return values.contiguous(memory_format=torch.channels_last)

    x = (one() + 0.5).requires_grad_()
    # The residual takes no gradient here: a leaf would copy what is the incoming gradient itself in a network.
    return x, one() if case.has_residual else None, one()


def median_ms(call: LayerCall, case: Case, batch_size: int, num_repeats: int) -> float:
    """Median device time of forward and backward, with three input sets in turn so that no cache holds them."""
    layer = NormAct(case.num_channels, dropout=case.dropout).cuda()
    sets = [tensors(case, batch_size) for _ in range(3)]

    def step(index: int) -> None:
        x, residual, grad = sets[index % len(sets)]
        x.grad = layer.weight.grad = layer.bias.grad = None
        call(layer, x, residual).backward(grad)

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


def largest(errors: list[float]) -> float:
    """The maximum, which is NaN as soon as one value is."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def relative_error(case: Case, batch_size: int) -> float:
    """The largest norm-wise error of the fused output and gradients against float64, without the random mask."""
    layer = NormAct(case.num_channels).cuda()
    with torch.no_grad():
        layer.weight.normal_(1.0, 0.3)
        layer.bias.normal_(0.0, 0.3)
    x, residual, grad = tensors(case, batch_size)
    if residual is not None:
        residual.requires_grad_()
    if not layer.is_fused(x):
        sys.exit("The layer did not take the fused kernels; their result cannot be checked.")
    wide = NormAct(case.num_channels).cuda().double()
    wide.load_state_dict(layer.state_dict())
    y = layer(x, residual)
    y.backward(grad)
    wide_x = x.detach().double().requires_grad_()
    wide_y = plain(wide, wide_x, None if residual is None else residual.detach().double())
    wide_y.backward(grad.double())
    pairs = [
        (y, wide_y),
        (x.grad, wide_x.grad),
        (layer.weight.grad, wide.weight.grad),
        (layer.bias.grad, wide.bias.grad),
        (layer.running_mean, wide.running_mean),
        (layer.running_var, wide.running_var),
    ]
    errors = []
    for actual, expected in pairs:
        assert actual is not None
        assert expected is not None
        errors.append(((actual.double() - expected).norm() / expected.norm()).item())
    if residual is not None:
        assert residual.grad is not None
        errors.append(((residual.grad.double() - grad.double()).norm() / grad.double().norm()).item())
    return largest(errors)


def main() -> None:
    """Prints a table and one line of totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark measures CUDA kernels and there is no CUDA device; run it on a machine with one.")
    obstacle = fused_obstacle(torch.device("cuda", torch.cuda.current_device()))
    if obstacle is not None:
        sys.exit(f"There is nothing to compare: {obstacle}.")
    torch.manual_seed(0)
    batch_size, num_repeats = arguments.batch_size, arguments.repeats

    began_s = time.perf_counter()
    errors = [relative_error(case, batch_size) for case in CASES]
    for case in CASES:
        median_ms(fused, case, batch_size, 1)
    torch.cuda.synchronize()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {batch_size}, bf16 channels_last")
    print(f"first calls and checks of the fused kernels: {time.perf_counter() - began_s:.1f} s")

    columns = f"{'eager ms':>9} {'compiled ms':>11} {'fused ms':>9} {'fused GB/s':>10}"
    print(f"{'forward + backward, a layer':<30} {columns}")
    eager_ms = compiled_ms = fused_ms = compile_s = 0.0
    total_bytes = 0
    for case in CASES:
        eager = median_ms(plain, case, batch_size, num_repeats)
        own = median_ms(fused, case, batch_size, num_repeats)
        torch._dynamo.reset()  # each kind of layer is compiled for itself, never for a range of shapes
        compiled = torch.compile(plain, dynamic=False)
        began_s = time.perf_counter()
        median_ms(compiled, case, batch_size, 1)
        compile_s += time.perf_counter() - began_s
        theirs = median_ms(compiled, case, batch_size, num_repeats)
        eager_ms += case.num_layers * eager
        compiled_ms += case.num_layers * theirs
        fused_ms += case.num_layers * own
        num_bytes = case.least_bytes(batch_size)
        total_bytes += case.num_layers * num_bytes
        print(f"{case.name:<30} {eager:9.3f} {theirs:11.3f} {own:9.3f} {num_bytes / own / 1e6:10.0f}", flush=True)
    rate = total_bytes / fused_ms / 1e6
    print(f"{'all 13 layers':<30} {eager_ms:9.3f} {compiled_ms:11.3f} {fused_ms:9.3f} {rate:10.0f}")
    print(f"first calls of torch.compile: {compile_s:.1f} s")
    print(
        f"RESULT fused_ms={fused_ms:.3f} eager_ms={eager_ms:.3f} compiled_ms={compiled_ms:.3f} "
        f"max_relative_error={largest(errors):.2e}"
    )


if __name__ == "__main__":
    main()
