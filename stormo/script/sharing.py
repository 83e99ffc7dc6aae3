"""What the main worker gives to all others: weights, values as bytes, and a seed of the random state as it is."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from stormo.distributed.world import World as Workers


@torch.no_grad()
def share_weights(workers: Workers, model: nn.Module) -> None:
    """Give all workers the main one's parameters and buffers; models of other shapes are refused."""
    shapes = [f"{name} {tuple(getattr(tensor, 'shape', ()))}" for name, tensor in model.state_dict().items()]
    workers.require_same({"wrapped model": hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:12]})
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.numel() and workers.size > 1:
            whole = tensor.detach().contiguous()
            workers.broadcast(whole.view(-1).view(torch.uint8))
            tensor.copy_(whole)


def share_bytes(workers: Workers, payloads: list[bytes] | None) -> list[bytes]:
    """The main worker's payloads, on all workers; the others give None."""
    tensors = None
    if payloads is not None:
        tensors = {str(n): torch.frombuffer(bytearray(each), dtype=torch.uint8) for n, each in enumerate(payloads)}
    return [tensor.numpy().tobytes() for tensor in workers.share_tensors(tensors).values()]


def seed_here() -> int:
    """A number that stands for the random state as it is, without drawing from it."""
    return int.from_bytes(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()[:6], "little")
