# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, attr-defined"
# ruff: noqa: D103, N803
"""A Triton kernel that sums a small vector over the GPUs of one host, through host memory that all of them map."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def _fence() -> None:
    # Orders the accesses before it and after it for all GPUs and the host. Its result is not used.
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def host_sum_kernel(
    vector_ptr: tl.tensor,
    values_ptr: tl.tensor,  # [2, all ranks, capacity], in host memory
    numbers_ptr: tl.tensor,  # [all ranks, 8], in host memory: the last sum to which a rank has given its values
    count_ptr: tl.tensor,  # sums that this rank has done
    ranks_ptr: tl.tensor,  # those whose vectors are summed, in order
    num_values: tl.tensor,
    rank: tl.tensor,
    num_ranks: tl.tensor,
    limit_ns: tl.tensor,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    number = tl.load(count_ptr) + 1
    # A rank writes to a slot again two sums later. By then all have given values to the sum in between, which they do
    # after they have read this one.
    slot_ptr = values_ptr + (number % 2) * num_ranks * CAPACITY
    offsets = tl.arange(0, BLOCK)
    mask = offsets < num_values
    tl.store(slot_ptr + rank * CAPACITY + offsets, tl.load(vector_ptr + offsets, mask=mask), mask=mask)
    tl.debug_barrier()
    _fence()
    tl.store(numbers_ptr + rank * 8, number)
    began = globaltimer()
    total = tl.zeros((BLOCK,), tl.float64)
    is_late = began < 0
    for place in range(SIZE):
        peer = tl.load(ranks_ptr + place)
        seen = tl.load(numbers_ptr + peer * 8, volatile=True)
        while (seen < number) & (globaltimer() - began < limit_ns):
            seen = tl.load(numbers_ptr + peer * 8, volatile=True)
        is_late = is_late | (seen < number)
        _fence()
        total += tl.load(slot_ptr + peer * CAPACITY + offsets, mask=mask, other=0.0, volatile=True)
    total = tl.where(is_late, float("nan"), total)
    tl.store(vector_ptr + offsets, total, mask=mask)
    tl.debug_barrier()
    tl.store(count_ptr, number)
