"""Gradients that travel as two thin matrices each (PowerSGD: Vogels et al., arXiv 1905.13727).

What a worker's gradient M has beyond the rank that travels stays with it, and is added to its next one, so that nothing
is lost for good. One step of power iteration, begun where the last one ended: P = M Q, summed over the workers and made
orthonormal; Q = Mᵀ P, summed; the mean gradient is P Qᵀ. Here a worker keeps what its own M has beside P: the sum over
the workers is that of the paper, whose errors also hold how workers differ from their mean, which adds up without end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from stormo.data.order import derive_seed
from stormo.parallel.compression import Parcel, Wire

_LEAST_SAVING = 2  # a matrix travels as it is unless that takes this many times fewer numbers


class LowRank:
    """The state of it: what each worker has kept back, and where the power iteration is."""

    def __init__(self, module: nn.Module, rank: int, seed: int) -> None:
        self.rank = rank
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._names = {id(parameter): name for name, parameter in trained.items()}
        # Both are written in place: on a GPU another stream than that of their making may still have to read them.
        self.errors: dict[str, Tensor] = {}
        self.bases: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}  # where the power iteration begins, the same on all workers
        for name, parameter in trained.items():
            if _is_cut(parameter, rank):
                rows, columns = _matrix_of(parameter).shape
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self.errors[name] = torch.zeros(rows, columns, dtype=wide, device=parameter.device)
                generator = torch.Generator().manual_seed(derive_seed(seed, "low rank", name))
                first = torch.randn(columns, rank, generator=generator, dtype=torch.float64)
                self._first[name] = first.to(self.errors[name])
                self.bases[name] = self._first[name].clone()
        self.is_rehearsal = False  # whether the passes under way belong to no step

    def exchange(self, parcel: Parcel, wire: Wire) -> None:
        """Send what changes most, and the small tensors as they are."""
        pairs = [(self._names[id(p)], g) for p, g in zip(parcel.parameters, parcel.gradients, strict=True)]
        cut = [(name, gradient) for name, gradient in pairs if name in self.errors]
        if not cut:  # also complex numbers, which have buckets of their own and are all there in the flat tensor alone
            wire.sum(parcel.flat)
            return
        plain = [gradient for name, gradient in pairs if name not in self.errors]
        matrices = [_matrix_of(gradient) + self.errors[name] for name, gradient in cut]
        # The first message is small tensors, P, and who has a gradient at all; the second one is Q.
        lefts = [matrix @ self.bases[name] for matrix, (name, _) in zip(matrices, cut, strict=True)]
        used = torch.stack([gradient.any() for _, gradient in cut]).to(lefts[0].dtype)
        _sum_together(wire, [*plain, *lefts, used])
        for index, left in enumerate(lefts):
            # DDP leaves out what no worker has used: what was kept back of it would travel to nowhere.
            left.mul_(used[index] > 0)
            orthonormalise(left)
        owns = [matrix.t() @ left for matrix, left in zip(matrices, lefts, strict=True)]
        rights = [own.clone() for own in owns]
        _sum_together(wire, rights)
        for index, (name, gradient) in enumerate(cut):
            left, right, basis = lefts[index], rights[index], self.bases[name]
            gradient.copy_((left @ right.t()).view(gradient.shape))
            if not self.is_rehearsal:
                torch.addmm(matrices[index], left, owns[index].t(), alpha=-1, out=self.errors[name])
                # A direction in which nothing came begins anew.
                came = torch.where(right.any(dim=0), right, self._first[name])
                basis.copy_(torch.where(used[index] > 0, came, basis))

    def take(self, errors: Mapping[str, Tensor], bases: Mapping[str, Tensor]) -> None:
        """Go on from these; what is missing begins anew."""
        for name, error in self.errors.items():
            error.copy_(errors[name]) if name in errors else error.zero_()
            basis, first = bases.get(name), self._first[name]
            self.bases[name].copy_(first if basis is None or basis.shape != first.shape else basis)


def _matrix_of(tensor: Tensor) -> Tensor:
    """A weight as a matrix: what belongs to one output is one row."""
    return tensor.reshape(tensor.shape[0], -1)


def _is_cut(parameter: Tensor, rank: int) -> bool:
    """Whether two thin matrices are enough smaller."""
    if parameter.ndim < 2 or parameter.is_complex() or not parameter.numel():
        return False
    rows, columns = _matrix_of(parameter).shape
    return rows * columns >= _LEAST_SAVING * (rows + columns) * rank


def _sum_together(wire: Wire, tensors: Sequence[Tensor]) -> None:
    """Sum each over the workers, in place, as one message for each type."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        flat = wire.sum(torch.cat([tensor.reshape(-1) for tensor in group]))
        for tensor, values in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def orthonormalise(matrix: Tensor) -> None:
    """Make the columns orthonormal, in place; one that lies in the span of those before it becomes nothing."""
    tiny = torch.finfo(matrix.dtype).tiny
    for index in range(matrix.shape[1]):
        column = matrix[:, index]
        length = torch.linalg.vector_norm(column)
        for _ in range(2):  # twice is enough: once leaves rounding errors of the length it had
            if index:
                before = matrix[:, :index]
                column -= before @ (before.t() @ column)
        left_over = torch.linalg.vector_norm(column)
        # What is left of it is rounding alone: a direction of noise would be sent as if it meant something.
        is_new = left_over > length * (torch.finfo(matrix.dtype).eps * matrix.shape[0] ** 0.5)
        column *= torch.where(is_new, 1.0 / left_over.clamp_min(tiny), torch.zeros_like(left_over))
