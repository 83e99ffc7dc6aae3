"""The model of a checkpoint as a program of torch.export or ONNX, compared with the model's own outputs."""

from __future__ import annotations

import io
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from stormo.data.batches import batch_length
from stormo.data.reading import is_stream
from stormo.errors import SettingError, StormoError, require_package
from stormo.parallel.pipeline.loss_capture import model_inputs
from stormo.parallel.pytree import tree_map_only, tree_tensors
from stormo.tasks.check import has_several_optimizers
from stormo.tasks.task import Task
from stormo.training.sanity_check import explain_errors
from stormo.training.trainer import make_batch

TOLERANCE = 1e-4  # of a model's largest output, or of 1 if all are smaller
_NUM_SAMPLES = 7  # of the batch that is traced: no usual size of anything else
_OTHER_SAMPLES = 3  # of the batch that tries another size
_MAX_ONNX_BYTES = 2**31 - 2**20  # of one protobuf file, beside what is no weight

_Args = tuple[tuple[Any, ...], Mapping[str, Any]]
_Call = Callable[[_Args], list[Tensor]]  # the outputs of a program


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A program that was written, and how it compares with its model."""

    fixed_batch: int | None  # samples that every batch must have; None for any number
    difference: float  # the largest of all outputs
    tolerance: float


def check_packages(kind: str) -> None:
    """Refuse a format whose packages are not installed."""
    for package in ("onnx", "onnxscript", "onnxruntime") if kind == "onnx" else ():
        require_package(package, f"--format {kind}", "onnx")


@torch.no_grad()
def export_model(task: Task, model: nn.Module, kind: str, file: Path) -> Exported:
    """Trace the model with validation data, write the program, read it again, and compare its outputs."""
    size = sum(tensor.nbytes for tensor in model.state_dict().values() if isinstance(tensor, Tensor))
    if kind == "onnx" and size > _MAX_ONNX_BYTES:
        raise SettingError(
            "--format onnx was set",
            f"the weights have {size / 2**30:.1f} GiB, and one ONNX file holds 2",
            "set --format torch-export",
        )
    traced, other = (_model_args(task, model, number) for number in (_NUM_SAMPLES, _OTHER_SAMPLES))
    program = _trace(model, traced, kind)
    with _quiet():
        run = _write_onnx(model, program, file) if kind == "onnx" else _write_torch(program, file)
    is_any_size = bool(program.range_constraints)
    compared = [args for _, args in ([traced, other] if is_any_size else [traced])]
    difference, tolerance = _compare(model, run, compared, kind)
    return Exported(fixed_batch=None if is_any_size else traced[0], difference=difference, tolerance=tolerance)


def _model_args(task: Task, model: nn.Module, number: int) -> tuple[int, _Args]:
    """How many of the first validation samples there are, up to a number, and what the loss gives to the model."""
    if has_several_optimizers(type(task)):
        raise SettingError(
            f"{type(task).__name__} has several optimizers",
            "its losses do not show how the model is to be called",
            "set --format safetensors",
        )
    with explain_errors(task, "validation_data", "loss"):
        data: Any = task.datasets()[1]
        samples = (
            itertools.islice(data, number) if is_stream(data) else (data[i] for i in range(min(number, len(data))))
        )
        batch = make_batch(task)(list(samples))
        method = f"{type(task).__name__}.loss"
        args = model_inputs(lambda stand_in: task.loss(stand_in, batch), model, method, "for an export")
    # The program would else depend on the strides of a slice.
    return batch_length(batch), tree_map_only(Tensor, Tensor.contiguous, args)


def _trace(model: nn.Module, traced: tuple[int, _Args], kind: str) -> ExportedProgram:
    length, (args, kwargs) = traced
    shapes = ShapesCollection()
    for tensor in tree_tensors((args, kwargs)):
        if tensor.ndim and len(tensor) == length:
            shapes[tensor] = {0: Dim.AUTO}
    with _explain(model, kind, "torch.export"):
        dynamic = shapes.dynamic_shapes(model, args, dict(kwargs))
        return torch.export.export(model, args, dict(kwargs), dynamic_shapes=dynamic)


@contextmanager
def _explain(model: nn.Module, kind: str, exporter: str) -> Iterator[None]:
    """Say in one sentence that an exporter cannot take the model."""
    try:
        with _quiet():
            yield
    except Exception as error:
        line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise SettingError(
            f"--format {kind} was set",
            f"{exporter} cannot take {type(model).__name__} ({line.rstrip('.')})",
            "change what its forward does, or set --format safetensors",
        ) from error


def _write_torch(program: ExportedProgram, file: Path) -> _Call:
    program.example_inputs = None  # they are samples of the user's data
    buffer = io.BytesIO()  # torch ends the process where it cannot write a file
    torch.export.save(program, buffer)
    file.write_bytes(buffer.getbuffer())
    module = torch.export.load(file).module()
    return lambda args: tree_tensors(module(*args[0], **args[1]))


def _write_onnx(model: nn.Module, program: ExportedProgram, file: Path) -> _Call:
    import onnxruntime

    with _explain(model, "onnx", "torch.onnx.export"):
        made = torch.onnx.export(program, dynamo=True, verbose=False)
    assert made is not None
    made.save(file, external_data=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(args: _Args) -> list[Tensor]:
        feed = dict(zip(names, (tensor.numpy() for tensor in tree_tensors(args)), strict=True))
        return [torch.from_numpy(output) for output in session.run(None, feed)]

    return run


def _compare(model: nn.Module, run: _Call, batches: Sequence[_Args], kind: str) -> tuple[float, float]:
    """The largest difference of any output, and the largest that is allowed; refuses a larger one."""
    differences, sizes = [0.0], [1.0]
    for args in batches:
        expected, found = tree_tensors(model(*args[0], **args[1])), run(args)
        if not expected or [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
            raise StormoError(f"The outputs of the {kind} program have other shapes than the model's; no file is left.")
        for own, other in zip(expected, found, strict=True):
            own_values, other_values = own.double().flatten(), other.double().flatten()
            is_other = own_values != other_values  # infinite values may be equal
            differences.append(_largest((own_values - other_values)[is_other].nan_to_num(nan=math.inf)))
            sizes.append(_largest(own_values[own_values.isfinite()]))
    difference, tolerance = max(differences), TOLERANCE * max(sizes)
    if difference > tolerance:
        raise StormoError(
            f"The outputs of the {kind} program differ from the model's by {difference:.2g}, and {tolerance:.2g} is "
            "allowed; no file is left."
        )
    return difference, tolerance


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if len(values) else 0.0


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of exporters about themselves; what they cannot do they raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
