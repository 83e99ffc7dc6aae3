"""Every layer-wise optimizer against a plain transcription of its paper's formulas, step by step in float64.

    python -m benchmarks.optimizer_exactness [--steps 50]

The transcriptions below go through the layers one by one, in plain Python numbers and new tensors, and share nothing
with stormo. Layers of several shapes are stepped at once: matrices and a convolution, which are adapted and decay,
and vectors, which by default are not; one layer begins at zero, one has no gradient in some steps, and the learning
rate changes in every step. The difference of two layers is max |a - b| / max |b|, taken after every step over
all layers; the command fails above 1e-12.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import aligned, largest, relative_difference, result_line
from stormo.optim import LAMB, LARC, LARS, Muon, NovoGrad

LIMIT = 1e-12
SHAPES = ((7, 5), (4, 3, 3, 3), (1, 6), (5,), (), (6, 2), (3, 4))
ZERO, IDLE = 5, 6  # the layer that begins at zero, and the one without a gradient in every third step
Step = Callable[[Tensor, Tensor, dict[str, Any], float, bool], Tensor]  # w, g, state, lr, adapted -> w


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One optimizer with its settings, and the transcription of it."""

    name: str
    kind: type[torch.optim.Optimizer]
    paper: Step
    options: dict[str, Any] = field(default_factory=dict)


def lars(*, nesterov: bool = False, clipped: bool = False, decay: float = 0.01, trust: float = 0.3) -> Step:
    """Algorithm 1 of arXiv 1708.03888; `clipped` is LARC, whose layers have min(local, global) for their lr."""
    momentum = 0.9

    def step(w: Tensor, g: Tensor, state: dict[str, Any], lr: float, adapted: bool) -> Tensor:
        beta = decay if adapted else 0.0
        w_norm, g_norm = w.norm().item(), g.norm().item()
        if adapted and w_norm > 0 and g_norm + beta * w_norm > 0:
            local = trust * w_norm / (g_norm + beta * w_norm)
            lr = min(local, lr) if clipped else lr * local
        change = lr * (g + beta * w)
        v: Tensor = momentum * state.get("v", torch.zeros_like(w)) + change
        state["v"] = v
        return w - (momentum * v + change if nesterov else v)

    return step


def lamb(*, bounds: tuple[float, float] | None = None, decay: float = 0.01, eps: float = 1e-6) -> Step:
    """Algorithm 2 of arXiv 1904.00962; `bounds` are those of its φ."""
    beta1, beta2 = 0.9, 0.999

    def step(w: Tensor, g: Tensor, state: dict[str, Any], lr: float, adapted: bool) -> Tensor:
        zero = torch.zeros_like(w)
        t = state["t"] = state.get("t", 0) + 1
        m: Tensor = beta1 * state.get("m", zero) + (1 - beta1) * g
        v: Tensor = beta2 * state.get("v", zero) + (1 - beta2) * g * g
        state["m"], state["v"] = m, v
        r: Tensor = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        if not adapted:
            return w - lr * r
        u = r + decay * w
        w_norm, u_norm = w.norm().item(), u.norm().item()
        phi = w_norm if bounds is None else min(max(w_norm, bounds[0]), bounds[1])
        return w - lr * (phi / u_norm if phi > 0 and u_norm > 0 else 1.0) * u

    return step


def novograd(*, averaging: bool = False, decay: float = 0.01) -> Step:
    """Algorithm 1 of arXiv 1905.11286; `averaging` weighs what is new by 1 - beta1."""
    beta1, beta2, eps = 0.95, 0.98, 1e-8

    def step(w: Tensor, g: Tensor, state: dict[str, Any], lr: float, adapted: bool) -> Tensor:
        update = g
        if adapted:
            square = (g * g).sum().item()
            v = state["v"] = beta2 * state["v"] + (1 - beta2) * square if "v" in state else square
            update = g / (v**0.5 + eps) + decay * w
        m: Tensor = beta1 * state.get("m", torch.zeros_like(w)) + (1 - beta1 if averaging else 1.0) * update
        state["m"] = m
        return w - lr * m

    return step


def muon(*, nesterov: bool = True, original: bool = False, decay: float = 0.01) -> Step:
    """Jordan's muon.py, in the dtype of the weights; `original` is its learning rate, else that of arXiv 2502.16982."""
    momentum, adam = 0.95, lamb(eps=1e-8)

    def step(w: Tensor, g: Tensor, state: dict[str, Any], lr: float, adapted: bool) -> Tensor:
        if not adapted:
            return adam(w, g, state, lr, False)
        m: Tensor = momentum * state.get("m", torch.zeros_like(w)) + (1 - momentum) * g
        state["m"] = m
        x = (momentum * m + (1 - momentum) * g if nesterov else m).reshape(len(w), -1)
        rows, columns = x.shape
        x = x / max(x.norm().item(), 1e-7)
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        factor = max(1, rows / columns) ** 0.5 if original else 0.2 * max(rows, columns) ** 0.5
        change: Tensor = decay * w + factor * x.view_as(w)
        return w - lr * change

    return step


_TRUST = {"trust_coefficient": 0.3}  # so that LARC clips some layers in some steps and others not
CASES = (
    Case(name="lars", kind=LARS, paper=lars(), options=_TRUST),
    Case(name="lars, Nesterov", kind=LARS, paper=lars(nesterov=True), options={**_TRUST, "nesterov": True}),
    Case(name="larc", kind=LARC, paper=lars(clipped=True), options=_TRUST),
    Case(
        name="larc, Nesterov", kind=LARC, paper=lars(clipped=True, nesterov=True), options={**_TRUST, "nesterov": True}
    ),
    Case(name="lamb", kind=LAMB, paper=lamb()),
    Case(name="lamb, norms bounded", kind=LAMB, paper=lamb(bounds=(0.5, 2.0)), options={"norm_bounds": (0.5, 2.0)}),
    Case(name="novograd", kind=NovoGrad, paper=novograd()),
    Case(name="novograd, averaging", kind=NovoGrad, paper=novograd(averaging=True), options={"grad_averaging": True}),
    Case(name="muon", kind=Muon, paper=muon()),
    Case(
        name="muon, original",
        kind=Muon,
        paper=muon(nesterov=False, original=True),
        options={"nesterov": False, "adjust_lr": "original"},
    ),
)


def difference(case: Case, num_steps: int) -> float:
    """The largest relative difference of any layer after any step."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    start[ZERO] = torch.zeros_like(start[ZERO])
    weights = [w.clone() for w in start]
    states: list[dict[str, Any]] = [{} for _ in start]
    parameters = [nn.Parameter(w.clone()) for w in start]
    optimizer = case.kind(parameters, lr=0.1, weight_decay=0.01, **case.options)  # type: ignore[call-arg]
    differences = []
    for step in range(num_steps):
        lr = 0.1 * (1 + step % 7)
        optimizer.param_groups[0]["lr"] = lr
        for index, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = None if index == IDLE and step % 3 == 0 else gradient
            if parameter.grad is not None:
                weights[index] = case.paper(weights[index], gradient, state, lr, parameter.ndim > 1)
        optimizer.step()
        ours = {str(index): parameter.detach() for index, parameter in enumerate(parameters)}
        differences.append(relative_difference(ours, {str(index): w for index, w in enumerate(weights)}))
    return largest(differences)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print a line an optimizer and the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args(arguments)
    differences = {case.name: difference(case, options.steps) for case in CASES}
    head = ["optimizer", f"max relative difference in {options.steps} steps"]
    print("\n".join(aligned([head, *([name, f"{value:.2e}"] for name, value in differences.items())])))
    worst = largest(differences.values())
    print(result_line({"max_relative_difference": worst}))
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
