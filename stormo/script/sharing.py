"""What the main worker gives to all others: weights, values as bytes, and a seed of the random state as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from stormo.errors import StormoError
from stormo.world.store import PeerFailedError
from stormo.world.world import World as Workers

_Result = TypeVar("_Result")


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


def on_main(workers: Workers, call: Callable[[], _Result]) -> _Result | None:
    """Call on the main worker; whatever goes wrong there is raised by all of them, who would wait for it in vain."""
    result: _Result | None = None
    failure: Exception | None = None
    if workers.is_main:
        try:
            result = call()
        except Exception as error:
            failure = error
    words = workers.share_json(None if failure is None else _in_words(failure))
    if failure is not None:
        raise failure
    if words is None:
        return result
    sentence, exit_code = words
    there = PeerFailedError(sentence) if exit_code is None else StormoError(sentence)
    there.exit_code = there.exit_code if exit_code is None else exit_code
    raise there


def _in_words(failure: Exception) -> tuple[str, int | None]:
    """A sentence for the others, and the exit code where it is one for the user."""
    if isinstance(failure, StormoError):
        return str(failure), failure.exit_code
    return f"rank 0 failed in what it does for all ({type(failure).__name__}: {failure}).", None


def seed_here() -> int:
    """A number that stands for the random state as it is, without drawing from it."""
    return int.from_bytes(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()[:6], "little")
