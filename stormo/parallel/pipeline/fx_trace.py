"""A model split by torch.fx: its forward is traced with its layers as leaves, and a segment is a run of operations.

Between two segments goes a tuple of all values that later ones need, so a connection may skip segments. Layers are
looked up in the model when a segment runs. A tensor that forward makes without its input is refused, as a trace would
freeze it. `self.training` is not frozen: both modes are traced.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from stormo.parallel.pytree import tree_leaves, tree_tensors

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, _CONTAINERS)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and all(a is not known for known in (*self.root.parameters(), *self.root.buffers())):
            raise ValueError("forward makes a tensor that does not come from its input, which a trace would freeze")
        return super().create_arg(a)


class Segment:
    """Consecutive operations of a traced model: a function of the previous segment's result."""

    def __init__(self, traced: _Traced, start: int, stop: int) -> None:
        self._traced = traced
        self._span = range(start, stop)
        self._takes = traced.live(start)
        self._gives = traced.live(stop)

    @property
    def name(self) -> str:
        """The layers that it calls."""
        called = [str(node.target) for node in self._nodes() if node.op == "call_module"]
        return " + ".join(called) or f"operations {self._span.start} to {self._span.stop - 1}"

    def modules(self) -> Iterator[nn.Module]:
        """The layers that it calls."""
        for node in self._nodes():
            if node.op == "call_module":
                yield self._traced.model.get_submodule(str(node.target))

    def direct(self) -> Iterator[tuple[nn.Module, str]]:
        """The parameters and buffers that it uses without calling their module: the module, and the name there."""
        for node in self._nodes():
            if node.op == "get_attr":
                path, _, name = str(node.target).rpartition(".")
                yield self._traced.model.get_submodule(path), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: the first segment on the arguments of the model, all others on a tuple."""
        nodes = self._traced.nodes()
        values = (
            self._traced.bound(args, kwargs) if self._span.start == 0 else dict(zip(self._takes, *args, strict=True))
        )
        index_of = self._traced.index_of
        for index in self._span:
            node = nodes[index]
            if node.op == "placeholder":
                continue
            positional, named = map_arg((node.args, dict(node.kwargs)), lambda inner: values[index_of[inner.name]])
            if node.op == "output":
                return positional[0]
            values[index] = self._traced.call(node, positional, named)
            for done in self._traced.done_at[index]:
                values.pop(done, None)  # free it after its last use, as the model does
        return tuple(values[index] for index in self._gives)

    def _nodes(self) -> list[fx.Node]:
        return [self._traced.nodes()[index] for index in self._span]


class _Traced:
    """The operations of a model in training and in validation, which differ only in their arguments."""

    def __init__(self, model: nn.Module, call: Call | None) -> None:
        self.model = model
        self._signature = inspect.signature(model.forward)
        self._fixed = self._not_tensors(call)
        self._by_mode = {mode: self._trace(mode) for mode in (True, False)}
        training, validation = self._by_mode[True], self._by_mode[False]
        if [(node.op, node.target) for node in training] != [(node.op, node.target) for node in validation]:
            raise ValueError("forward runs other operations in training than in validation")
        self.index_of = {node.name: index for index, node in enumerate(training)}
        last_use: dict[int, int] = {}
        for index, node in enumerate(training):
            last_use |= {self.index_of[inner.name]: index for inner in node.all_input_nodes}
        self.done_at: list[list[int]] = [[] for _ in training]
        for value, index in last_use.items():
            self.done_at[index].append(value)

    def nodes(self) -> list[fx.Node]:
        return self._by_mode[self.model.training]

    def live(self, cut: int) -> list[int]:
        """The values made before a split point that are needed after it."""
        nodes = self._by_mode[True]
        needed = {self.index_of[inner.name] for node in nodes[cut:] for inner in node.all_input_nodes}
        return sorted(index for index in needed if index < cut)

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        """The arguments of a call by the indices of their nodes."""
        call = self._signature.bind(*args, **kwargs)
        call.apply_defaults()
        flat: list[Any] = []
        for name, value in call.arguments.items():
            flat += tree_leaves(value) if name in self._fixed else [value]
        indices = [index for index, node in enumerate(self._by_mode[True]) if node.op == "placeholder"]
        return dict(zip(indices, flat, strict=True))

    def call(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if node.op == "call_module":
            return self.model.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            return getattr(self.model.get_submodule(path), name)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def parameters(self, node: fx.Node) -> list[nn.Parameter]:
        """The parameters that an operation uses."""
        if node.op == "call_module":
            return list(self.model.get_submodule(str(node.target)).parameters())
        if node.op == "get_attr":
            value = self.call(node, (), {})
            return [value] if isinstance(value, nn.Parameter) else []
        return []

    def _not_tensors(self, call: Call | None) -> dict[str, Any]:
        """Arguments without tensors, which a trace takes as constants and checks in every call."""
        if call is None:
            defaults = {name: parameter.default for name, parameter in self._signature.parameters.items()}
            return {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}
        args, kwargs = call
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if not tree_tensors(value)}

    def _trace(self, is_training: bool) -> list[fx.Node]:
        was_training = self.model.training
        self.model.training = is_training  # of the root alone: its layers are not entered
        try:
            before = self._states()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                nodes = list(_Tracer().trace(self.model, self._fixed or None).nodes)
            for name, state in self._states().items():
                if before.get(name) != state:
                    raise ValueError(f"forward changes {name} without the input, which a trace would not repeat")
            return nodes
        finally:
            self.model.training = was_training

    def _states(self) -> dict[str, tuple[int, int]]:
        """The identity and the version of every parameter and buffer."""
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: (id(tensor), tensor._version) for name, tensor in tensors}


def trace(model: nn.Module, call: Call | None = None) -> list[Segment]:
    """The segments of a model, one for each layer; layers that share a parameter are in one segment."""
    traced = _Traced(model, call)
    nodes = traced.nodes()
    spans: dict[int, tuple[int, int]] = {}  # first and last operation of each parameter
    for index, node in enumerate(nodes):
        for parameter in traced.parameters(node):
            spans[id(parameter)] = spans.get(id(parameter), (index, index))[0], index
    layers = [index for index, node in enumerate(nodes) if node.op == "call_module"]
    # Operations before the first layer belong to it.
    cuts = [cut for cut in layers[1:] if not any(first < cut <= last for first, last in spans.values())]
    return [Segment(traced, start, stop) for start, stop in zip([0, *cuts], [*cuts, len(nodes)], strict=True)]
