"""Forward, loss and backward of a full micro-batch as one CUDA graph: recorded once, replayed without Python.

A replay reads static inputs, writes (never adds) static gradients, and draws new random numbers from the device's
generator. Host code runs only once, at the capture: a task that depends on it is refused.
"""

from __future__ import annotations

import gc
import random
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stormo.errors import first_names
from stormo.launch.torch_errors import SYNCHRONIZES
from stormo.parallel.pytree import TreeSpec, tree_flatten, tree_unflatten

_HIDDEN_FRAMES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, deque)

ForwardBackward = Callable[[Any], Tensor]  # of a batch's data; returns the detached loss


class CaptureRefusedError(Exception):
    """Why a micro-batch cannot be a CUDA graph, as the end of a sentence."""


class MicroBatchGraph:
    """A captured micro-batch."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: Sequence[Tensor],
        structure: TreeSpec,
        loss: Tensor,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._graph = graph
        self._inputs = tuple(inputs)
        self._structure = structure
        self._loss = loss
        # Referenced here, so that clearing `grad` after a step does not free what the next replay writes.
        self._gradients = tuple((p, p.grad) for p in parameters if p.grad is not None)

    def replay(self, data: Any) -> Tensor | None:
        """Set the gradients of this batch and return its loss; do nothing and return None for another shape."""
        leaves, structure = tree_flatten(data)
        if structure != self._structure or not all(map(_is_alike, leaves, self._inputs)):
            return None
        for static, leaf in zip(self._inputs, leaves, strict=True):
            static.copy_(leaf)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss.clone()  # the next replay overwrites it


def _is_alike(leaf: Any, static: Tensor) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.shape == static.shape
        and leaf.dtype == static.dtype
        and leaf.device == static.device
    )


def capture(
    forward_backward: ForwardBackward, data: Any, module: nn.Module, owners: Mapping[str, Any], *, has_peers: bool
) -> MicroBatchGraph:
    """Record a micro-batch like this one, or raise `CaptureRefusedError` and leave the process usable.

    It changes buffers and random generators as three micro-batches do, which the caller undoes.

    Args:
        forward_backward: as it runs in a step; it must add to `grad` where there is one.
        data: a batch without a `batch_obstacle`.
        module: its parameters get the gradients.
        owners: objects by name whose plain attributes a micro-batch must not change.
        has_peers: whether collectives are captured. Then an error before the capture itself is raised as it is: the
            peers of this rank wait in a collective, and end only when this rank fails.
    """
    leaves, structure = tree_flatten(data)
    device = leaves[0].device
    inputs = [leaf.clone() for leaf in leaves]
    static = tree_unflatten(inputs, structure)
    parameters = list(module.parameters())
    main = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device) if main == torch.cuda.default_stream(device) else main
    side.wait_stream(main)
    torch.cuda.empty_cache()  # streams do not share cached memory: a whole micro-batch would be allocated twice
    is_recording = False
    try:
        with torch.cuda.stream(side):
            forward_backward(static)  # creates handles, workspaces and tuned kernels
            _check_host(forward_backward, static, {"model": module, **owners})
            clear_gradients(parameters)  # so that the capture writes gradients instead of adding to them
            is_recording = True
            graph, loss = _record(forward_backward, static, device)
        return MicroBatchGraph(graph, inputs, structure, loss, parameters)
    except Exception as error:
        if isinstance(error, CaptureRefusedError) or (has_peers and not is_recording):
            raise
        raise CaptureRefusedError(_reason(error)) from None
    finally:
        main.wait_stream(side)
        clear_gradients(parameters)


def leave_default_stream(device: torch.device) -> None:
    """Let this thread work on another stream from now on.

    DDP and FSDP add gradients up on the stream on which they were made, and a capture cannot use the default one.
    """
    before = torch.cuda.current_stream(device)
    if before == torch.cuda.default_stream(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(before)
        torch.cuda.set_stream(stream)


def clear_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set all gradients to None."""
    for parameter in parameters:
        parameter.grad = None


def batch_obstacle(data: Any) -> str | None:
    """Why a batch cannot be the input of a graph, as the end of a sentence, or None."""
    leaves, _ = tree_flatten(data)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            return f"a batch holds a value of type {type(leaf).__name__}, which a replay would freeze"
        if leaf.device.type != "cuda":
            return f"a batch holds a tensor on the {leaf.device.type}"
        if leaf.requires_grad:
            return "a batch holds a tensor that needs a gradient"
    return None if leaves else "a batch holds no tensor"


def _check_host(forward_backward: ForwardBackward, data: Any, owners: Mapping[str, Any]) -> None:
    """Run a micro-batch and check whether it depends on the host: torch does not recover well from a failed capture."""
    before = host_state(owners)
    with _synchronisations() as places:
        loss = forward_backward(data)
    after = host_state(owners)
    if places:
        raise CaptureRefusedError(f"a micro-batch waits for the device{places[0]}")
    changed = sorted(name for name in before.keys() | after.keys() if _differ(before.get(name), after.get(name)))
    if changed:
        raise CaptureRefusedError(f"a micro-batch changes {first_names(changed)} on the host, which a replay would not")
    if loss.device.type != "cuda":
        raise CaptureRefusedError(f"the loss is a tensor on the {loss.device.type}")


def _differ(first: Any, second: Any) -> bool:
    return first is not second and bool(first != second)  # a NaN is equal to itself here


def host_state(owners: Mapping[str, Any]) -> dict[str, Any]:
    """What a micro-batch may change on the host: generators, and counters and the like in objects."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state: dict[str, Any] = {
        "torch's CPU generator": torch.get_rng_state().numpy().tobytes(),
        "Python's generator": random.getstate(),
        "NumPy's generator": repr(numpy_state["state"]["key"].tobytes()) + str(numpy_state["state"]["pos"]),
    }
    for name, owner in owners.items():
        modules = owner.named_modules(prefix=name) if isinstance(owner, nn.Module) else [(name, owner)]
        for path, part in modules:
            for key, value in getattr(part, "__dict__", {}).items():
                if isinstance(value, _PLAIN):
                    state[f"{path}.{key}"] = value
                elif isinstance(value, _CONTAINERS):
                    state[f"{path}.{key}"] = len(value)
    return state


@contextmanager
def _synchronisations() -> Iterator[list[str]]:
    """Collect where operations wait for the device.

    They are no errors: a rank that left its micro-batch would leave its peers in a collective. The capture itself finds
    waits of which torch does not warn Python.
    """
    places: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **named: Any) -> None:
            if SYNCHRONIZES in str(message):
                places.append(_place([(filename, lineno)]))
            else:
                show(message, category, filename, lineno, *rest, **named)

        warnings.showwarning = note
        warnings.filterwarnings("always", message=f".*{SYNCHRONIZES}")
        _set_sync_debug_mode(1)
        try:
            yield places
        finally:
            _set_sync_debug_mode(mode)


def _set_sync_debug_mode(mode: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it misses some operations, which the capture finds
        torch.cuda.set_sync_debug_mode(mode)


def _record(forward_backward: ForwardBackward, data: Any, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a micro-batch on the current stream."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # the graph's memory must fit beside what is cached
    loss, failure = None, None
    was_collecting = gc.isenabled()
    gc.disable()  # if a graph in a reference cycle were destroyed now, CUDA would fail the capture
    try:
        # Other threads, such as a loader that pins memory, may use CUDA meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            loss = forward_backward(data)
        except Exception as error:
            failure = error
        try:
            graph.capture_end()
        except Exception as error:
            _recover(device, pool)
            failure = failure or error
    finally:
        if was_collecting:
            gc.enable()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # the reference cycle would keep the memory of the micro-batch
    assert loss is not None
    return graph, loss


def _recover(device: torch.device, pool: Any) -> None:
    """After a capture that CUDA has ended: torch leaves its allocator and its generator in the capture.

    torch has no public call for the allocator.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_releasePool(index, pool)
    # The generator leaves its capture state at the end of a capture that succeeds.
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=device)
    graph.capture_end()


def _reason(error: Exception) -> str:
    place = _place([(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)])
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}{place}: {text.rstrip('.')}"


def _place(lines: Sequence[tuple[str, int | None]]) -> str:
    """The last of these lines of files that is the user's."""
    own = [line for line in lines if not line[0].startswith(_HIDDEN_FRAMES)]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""
