"""Time of a layer-wise optimizer's step: stormo's, a plain loop over the layers, and timm's.

    python -m benchmarks.optimizers [--device cuda] [--rounds 20] [--steps 10] [--tensors 300] [--width 1024]

Two models: many small tensors (300 by default, 150 matrices of 64 × 64 and their biases), where a step costs the
launches of its kernels, and a few large ones (17 million parameters), where it costs the memory's bandwidth. Every
layer is adapted and decays on all sides, so that they do the same work. The sides take turns of a few steps, in
random order within a round, and the device is waited for only at the end of a turn. Times are medians; stormo's and
the loop's parameters must agree in the end. timm is left out by name where it is not installed. The result is the
speed-up over the loop and over timm with the many small tensors; nan where there was nothing to compare with.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import aligned, result_line
from stormo.optim import LAMB, LARS, NovoGrad

_NUM_WARM_UP_ROUNDS = 2
_RATE, _DECAY, _TRUST, _EPS = 0.01, 0.01, 0.001, 1e-6
_MOMENTUM, _ADAM_BETAS, _NOVOGRAD_BETAS = 0.9, (0.9, 0.999), (0.95, 0.98)

States = list[dict[str, Any]]
Step = Callable[[], Any]


def lars_loop(parameters: Sequence[Tensor], states: States) -> None:
    """LARS layer by layer, as one would write it down."""
    for w, state in zip(parameters, states, strict=True):
        g = gradient_of(w)
        w_norm, g_norm = w.norm(), g.norm()
        ratio = torch.where((w_norm > 0) & (g_norm > 0), _TRUST * w_norm / (g_norm + _DECAY * w_norm), 1.0)
        update = g.add(w, alpha=_DECAY).mul_(ratio)
        if "v" not in state:
            state["v"] = torch.zeros_like(w)
        state["v"].mul_(_MOMENTUM).add_(update, alpha=_RATE)
        w.sub_(state["v"])


def lamb_loop(parameters: Sequence[Tensor], states: States) -> None:
    """LAMB layer by layer."""
    beta1, beta2 = _ADAM_BETAS
    for w, state in zip(parameters, states, strict=True):
        g = gradient_of(w)
        if not state:
            state.update(t=0, m=torch.zeros_like(w), v=torch.zeros_like(w))
        state["t"] += 1
        state["m"].mul_(beta1).add_(g, alpha=1 - beta1)
        state["v"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        below = (state["v"] / (1 - beta2 ** state["t"])).sqrt_().add_(_EPS)
        update = (state["m"] / (1 - beta1 ** state["t"])).div_(below).add_(w, alpha=_DECAY)
        w_norm, u_norm = w.norm(), update.norm()
        ratio = torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, 1.0)
        w.sub_(update.mul_(ratio), alpha=_RATE)


def novograd_loop(parameters: Sequence[Tensor], states: States) -> None:
    """NovoGrad layer by layer."""
    beta1, beta2 = _NOVOGRAD_BETAS
    for w, state in zip(parameters, states, strict=True):
        g = gradient_of(w)
        square = g.norm().square()
        if not state:
            state.update(v=square.clone(), m=torch.zeros_like(w))
        else:
            state["v"].mul_(beta2).add_(square, alpha=1 - beta2)
        update = (g / (state["v"].sqrt() + _EPS)).add_(w, alpha=_DECAY)
        state["m"].mul_(beta1).add_(update)
        w.sub_(state["m"], alpha=_RATE)


def gradient_of(parameter: Tensor) -> Tensor:
    """The gradient, which every parameter has here."""
    assert parameter.grad is not None
    return parameter.grad


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One optimizer as each side has it."""

    name: str
    stormo: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    loop: Callable[[Sequence[Tensor], States], None]
    timm: str  # class of timm.optim
    timm_options: dict[str, Any]


RULES = (
    Rule(
        name="lars",
        stormo=lambda p: LARS(p, _RATE, momentum=_MOMENTUM, weight_decay=_DECAY, trust_coefficient=_TRUST, adapt=True),
        loop=lars_loop,
        timm="Lars",
        timm_options={"momentum": _MOMENTUM, "trust_coeff": _TRUST, "always_adapt": True},
    ),
    Rule(
        name="lamb",
        stormo=lambda p: LAMB(p, _RATE, betas=_ADAM_BETAS, eps=_EPS, weight_decay=_DECAY, adapt=True),
        loop=lamb_loop,
        timm="Lamb",
        timm_options={"betas": _ADAM_BETAS, "eps": _EPS, "max_grad_norm": None, "always_adapt": True},
    ),
    Rule(
        name="novograd",
        stormo=lambda p: NovoGrad(p, _RATE, betas=_NOVOGRAD_BETAS, eps=_EPS, weight_decay=_DECAY, adapt=True),
        loop=novograd_loop,
        timm="NvNovoGrad",
        timm_options={"betas": _NOVOGRAD_BETAS, "eps": _EPS},
    ),
)


def parameters_of(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[nn.Parameter]:
    """The same parameters and gradients on every call."""
    generator = torch.Generator(device).manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator, device=device)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator, device=device)
    return made


def sides(rule: Rule, shapes: Sequence[tuple[int, ...]], device: torch.device) -> tuple[dict[str, Step], Step]:
    """A step of stormo's and of the loop, and the check that they agree."""
    ours, plain = parameters_of(shapes, device), parameters_of(shapes, device)
    states: States = [{} for _ in plain]

    @torch.no_grad()
    def loop() -> None:
        rule.loop(plain, states)

    def check() -> None:
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)

    return {"stormo": rule.stormo(ours).step, "loop": loop}, check


def timm_side(rule: Rule, shapes: Sequence[tuple[int, ...]], device: torch.device) -> Step | str:
    """A step of timm's, or why there is none."""
    try:
        kind = getattr(importlib.import_module("timm.optim"), rule.timm)
        optimizer = kind(parameters_of(shapes, device), lr=_RATE, weight_decay=_DECAY, **rule.timm_options)
        optimizer.step()
    except Exception as error:  # whatever keeps it from running here is said, and it is left out
        return f"timm's {rule.timm} is left out: {type(error).__name__}: {error}"
    step: Step = optimizer.step
    return step


def measure_ms(steps: dict[str, Step], options: argparse.Namespace) -> dict[str, float]:
    """The median time of a step of each side, which take turns."""
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    draw = random.Random(0)
    for turn in range(-_NUM_WARM_UP_ROUNDS, options.rounds):
        for name in draw.sample(list(steps), len(steps)):
            wait(options.device)
            began_s = time.perf_counter()
            for _ in range(options.steps):
                steps[name]()
            wait(options.device)
            if turn >= 0:
                times_ms[name].append((time.perf_counter() - began_s) * 1e3 / options.steps)
    return {name: statistics.median(values) for name, values in times_ms.items()}


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="default: cuda")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side (default: 20)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn (default: 10)")
    parser.add_argument("--tensors", type=int, default=300, help="of the model of small tensors (default: 300)")
    parser.add_argument("--width", type=int, default=1024, help="of the 16 large matrices (default: 1024)")
    options = parser.parse_args(arguments)
    models = {
        f"{options.tensors} tensors": [(64, 64), (64,)] * (options.tensors // 2),
        f"{16 * options.width * (options.width + 1) / 1e6:.1f} M parameters": [
            (options.width, options.width),
            (options.width,),
        ]
        * 16,
    }
    rows, figures = [["step, ms", "stormo", "loop", "timm"]], dict[str, float]()
    obstacles: list[str] = []
    for index, (model, shapes) in enumerate(models.items()):
        for rule in RULES:
            steps, check = sides(rule, shapes, options.device)
            theirs = timm_side(rule, shapes, options.device)
            if isinstance(theirs, str):
                obstacles.append(theirs)
            else:
                steps["timm"] = theirs
            times_ms = measure_ms(steps, options)
            check()
            shown = [f"{times_ms[name]:.3f}" if name in times_ms else "n/a" for name in ("stormo", "loop", "timm")]
            rows.append([f"{rule.name}, {model}", *shown])
            if index == 0:
                for other in ("timm", "loop"):
                    figures[f"{rule.name}_vs_{other}"] = times_ms.get(other, math.nan) / times_ms["stormo"]
    name = torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else str(options.device)
    print(f"{name}, torch {torch.__version__}, medians of {options.rounds} turns of {options.steps} steps")
    print("\n".join([*aligned(rows), *dict.fromkeys(obstacles)]))
    ordered = [f"{rule.name}_vs_{side}" for side in ("timm", "loop") for rule in RULES]
    print(result_line({ratio: figures[ratio] for ratio in ordered}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
