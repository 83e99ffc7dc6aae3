"""Activation checkpointing: modules that keep none of their activations and compute them again in backward.

Chen et al., "Training deep nets with sublinear memory cost", arXiv 1604.06174. The second computation is the first one
again: with the same random numbers, which is torch's own care, and with the buffers that the first one began with. What
it does to buffers is thrown away: running statistics are those of one pass. Collectives are repeated, on all workers in
the same order.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from stormo.errors import SettingError
from stormo.layers.norm_act import NormAct

_Place = tuple[nn.Module, str]  # a module, and the name of a buffer of its own


def recompute(model: nn.Module, paths: Sequence[str]) -> None:
    """Let the modules at these paths compute their activations again, in place; the empty path is the model."""
    modules = {path: model.get_submodule(path) for path in paths}
    for path, module in modules.items():
        if "forward" in vars(module):
            raise SettingError(
                "--checkpoint-activations was set",
                f"the forward of {path or 'the model'} ({type(module).__name__}) was replaced on the object itself",
                "write it as a method of its class, or name other modules with --shard-modules",
            )
    for module in modules.values():
        if not isinstance(module, Recomputed):
            kind: Any = type(module)
            module.__class__ = _recomputed(kind)
            if not _buffers(module):
                module._changing_buffers = []  # type: ignore[assignment]


class Recomputed:
    """What stands before the class of a module that is computed again; its names and those of its parts stay."""

    training: bool
    _own_class: type[Any]
    _changing_buffers: list[_Place] | None = None  # None until a first pass has shown them

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, which forgets its activations where a backward pass is to come."""
        own = super().forward  # type: ignore[misc]
        if not (self.training and torch.is_grad_enabled()):
            return own(*args, **kwargs)
        names = tuple(kwargs)

        def run(*values: Any) -> Any:
            count = len(values) - len(names)
            return own(*values[:count], **dict(zip(names, values[count:], strict=True)))

        # All by position: torch keeps the random numbers of those devices alone that it sees there.
        values = (*args, *kwargs.values())
        if self._changing_buffers == []:
            return checkpoint(run, *values, use_reentrant=False)
        return self._run_with_buffers(run, values)

    # The compiler would see a buffer change once where it changes twice. What `run` calls is compiled.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, unused-ignore]
    def _run_with_buffers(self, run: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        before = _AsBefore(_buffers(self) if self._changing_buffers is None else self._changing_buffers)
        result = checkpoint(run, *values, use_reentrant=False, context_fn=lambda: (nullcontext(), before))
        if self._changing_buffers is None:
            self._changing_buffers = before.keep_changing()
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and pickled by its own class: the one made here has no name to be found by."""
        parts: Any = super().__reduce_ex__(2)
        _, arguments, *rest = parts
        return _made_again, (self._own_class, arguments[1:]), *rest


class _AsBefore(AbstractContextManager[None]):
    """The buffers as they are now; within it modules work on copies of these."""

    def __init__(self, places: list[_Place]) -> None:
        self._copies = [_clone(module._buffers.get(name)) for module, name in places]
        self._places = places
        self._versions = [_version(module, name) for module, name in places]
        self._now: list[Tensor | None] = []

    def keep_changing(self) -> list[_Place]:
        """Forget those that the pass has neither written nor changed, and return the others.

        Those of batch norms always count: a worker whose first pass has no samples does not move them.
        """
        kept = [
            (place, copy)
            for place, copy, version in zip(self._places, self._copies, self._versions, strict=True)
            if isinstance(place[0], _NormBase | NormAct)
            or version != _version(*place)
            or not _are_equal(place[0]._buffers.get(place[1]), copy)  # written as `.data`
        ]
        self._places, self._copies = [place for place, _ in kept], [copy for _, copy in kept]
        return self._places

    def __enter__(self) -> None:
        self._now = [module._buffers.get(name) for module, name in self._places]
        self._set([_clone(copy) for copy in self._copies])

    def __exit__(self, *_: object) -> None:
        self._set(self._now)

    def _set(self, buffers: list[Tensor | None]) -> None:
        for (module, name), buffer in zip(self._places, buffers, strict=True):
            module._buffers[name] = buffer


def _buffers(module: Any) -> list[_Place]:
    return [(part, name) for part in module.modules() for name in part._buffers]


def _version(module: nn.Module, name: str) -> tuple[int, int] | None:
    buffer = module._buffers.get(name)
    return None if buffer is None else (id(buffer), buffer._version)


def _clone(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


@functools.cache
def _recomputed(own: type[Any]) -> type[Any]:
    body = {"_own_class": own, "__module__": own.__module__, "__doc__": own.__doc__}
    return types.new_class(own.__name__, (Recomputed, own), exec_body=lambda names: names.update(body))


def _made_again(own: Any, arguments: tuple[Any, ...]) -> Any:
    kind = _recomputed(own)
    return kind.__new__(kind, *arguments)
