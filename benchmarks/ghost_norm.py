"""Ghost batch norm, layer by layer: forward and backward against a Python loop over ghosts and plain batch norm.

    python -m benchmarks.ghost_norm [--device cpu] [--batch-size 64] [--ghost-batch-size 8]

The loop is `torch.cat([norm(chunk) for chunk in x.split(size)])`: what one would write without the layer. The layers
are those of the reference network's three widths. The last line holds speeds relative to both, over all layers: above
1 the ghost layer is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stormo.layers.ghost_batch_norm import convert_ghost_batch_norm


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of layer."""

    num_channels: int
    side: int
    memory_format: torch.memory_format

    @property
    def name(self) -> str:
        """In a row of the table."""
        layout = "channels_last" if self.memory_format == torch.channels_last else "plain"
        return f"{self.num_channels:>4} x {self.side:>2}² {layout}"


CASES = [
    Case(num_channels=num_channels, side=side, memory_format=memory_format)
    for num_channels, side in ((160, 28), (320, 14), (640, 7))
    for memory_format in (torch.contiguous_format, torch.channels_last)
]
WARM_UP = 3


def looped(norm: nn.Module, size: int) -> Callable[[Tensor], Tensor]:
    """Batch norm of one ghost after another."""
    return lambda x: torch.cat([norm(chunk) for chunk in x.split(size)])


def time_ms(layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, num_repeats: int) -> float:
    """Median time of a forward and a backward pass, the device waited for."""
    times_ms = []
    for index in range(WARM_UP + num_repeats):
        x.grad = None
        wait(x.device)
        began_s = time.perf_counter()
        layer(x).backward(grad)
        wait(x.device)
        if index >= WARM_UP:
            times_ms.append((time.perf_counter() - began_s) * 1e3)
    return statistics.median(times_ms)


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def error_of(ghosts: nn.Module, loop: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The largest difference of outputs, so that what is timed is known to be the same."""
    with torch.no_grad():
        return float((ghosts(x) - loop(x)).abs().max())


def main() -> None:
    """Times every case and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, help="samples of a micro-batch; default 1024 on a GPU, 64 on a CPU")
    parser.add_argument("--ghost-batch-size", type=int, help="default 32 on a GPU, 8 on a CPU")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    batch_size, size = (1024, 32) if device.type == "cuda" else (64, 8)
    batch_size, size = arguments.batch_size or batch_size, arguments.ghost_batch_size or size
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count = torch.get_num_threads()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {count} thread{'s' * (count > 1)}"
    print(f"{where}; {dtype}, batches of {batch_size}, ghosts of {size}; forward and backward, median of times in ms")
    print(f"{'layer':<26} {'ghosts':>9} {'loop':>9} {'plain':>9} {'max error':>10}")
    totals_ms = [0.0, 0.0, 0.0]
    for case in CASES:
        torch.manual_seed(0)
        x = torch.randn(batch_size, case.num_channels, case.side, case.side, device=device, dtype=dtype)
        x = x.contiguous(memory_format=case.memory_format).requires_grad_()
        grad = torch.randn_like(x)
        ghosts = convert_ghost_batch_norm(nn.BatchNorm2d(case.num_channels, device=device), size)
        plain = nn.BatchNorm2d(case.num_channels, device=device)
        loop = looped(plain, size)
        error = error_of(ghosts, loop, x)
        row_ms = [time_ms(layer, x, grad, arguments.repeats) for layer in (ghosts, loop, plain)]
        totals_ms = [total + new for total, new in zip(totals_ms, row_ms, strict=True)]
        print(f"{case.name:<26} {row_ms[0]:9.3f} {row_ms[1]:9.3f} {row_ms[2]:9.3f} {error:10.1e}", flush=True)
    own, loop_ms, plain_ms = totals_ms
    print(f"{'all':<26} {own:9.3f} {loop_ms:9.3f} {plain_ms:9.3f}")
    print(f"RESULT ghost_vs_loop={loop_ms / own:.2f} ghost_vs_plain={plain_ms / own:.2f}")


if __name__ == "__main__":
    main()
