"""What is counted on tensors without memory is what tensors with memory come to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stormo.data.batches import repeat_rows, tensors_in
from stormo.layers.norm_act import NormAct
from stormo.parallel.units import recompute, units_of
from stormo.predict.fake_tensors import FakeModel, MemoryTrace
from stormo.predict.forecast import Load
from stormo.predict.tracing import PassKind, Tracer, UntraceableError, few_samples, forbid_fetching
from stormo.tasks.language_model import LanguageModel, LanguageModelOptions, Size
from stormo.tasks.task import NoOptions, Task
from tests.tiny_task import Tiny, TinyOptions

SIZE = 6


class Convolutions(Task):
    """Convolutions, batch norm, pooling, tied layers and a frozen one."""

    def model(self) -> nn.Module:
        """As the class says."""
        layer = nn.Conv2d(4, 4, 3, padding=1)
        frozen = nn.Conv2d(1, 4, 3).requires_grad_(False)
        blocks = [nn.Sequential(layer, nn.BatchNorm2d(4), nn.ReLU()) for _ in range(2)]
        return nn.Sequential(frozen, *blocks, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 9, 3))

    def train_data(self) -> Any:
        """Images of 8 × 8."""
        return [(torch.rand(1, 8, 8), index % 3) for index in range(16)]

    validation_data = train_data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(model(batch[0].to(torch.get_default_dtype())), batch[1])


class ReadsValues(Convolutions):
    """A loss that cannot be computed without values."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Of some samples, by their labels."""
        return super().loss(model, [part[batch[1] > 0] for part in batch])


def words(dropout: float = 0.0) -> LanguageModel:
    task = LanguageModel(LanguageModelOptions(block=16, train_bytes=4096, validation_bytes=1024, dropout=dropout))
    task.size = Size(2, 32, 4, 16)
    return task


def make(name: str) -> Task:
    if name == "words":
        task: Task = words()
    elif name == "points":
        task = Tiny(TinyOptions(dropout=0.1))
    else:
        task = Convolutions(NoOptions())
    forbid_fetching(task)
    return task


@pytest.mark.parametrize(
    ("name", "recomputes", "precision"),
    [
        ("words", False, "fp32"),
        ("words", True, "fp32"),
        ("points", False, "fp64"),
        ("points", True, "fp32"),
        ("images", False, "fp32"),
        ("images", True, "fp64"),
    ],
)
def test_a_pass_without_memory_holds_what_a_pass_on_a_cpu_holds(name: str, recomputes: bool, precision: str) -> None:
    task = make(name)
    tracer = Tracer(task, FakeModel(task, precision), few_samples(task), precision, on_gpu=False)
    curve = tracer.curve(SIZE, PassKind(recomputes=recomputes))
    torch.set_default_dtype(torch.float64 if precision == "fp64" else torch.float32)
    model = task.model().to(torch.get_default_dtype())
    if recomputes:
        recompute(model, units_of(model) or [""])
        for layer in model.modules():
            if hasattr(layer, "_changing_buffers"):
                layer._changing_buffers = []  # type: ignore[assignment]
    data = repeat_rows(few_samples(task), SIZE)
    with MemoryTrace(model) as trace:
        trace.add(tensors_in(data))
        loss = task.loss(model, data) * 1.0
        kept = trace.now[0]
        loss.backward()
    assert max(map(sum, curve.rows[0])) == max(map(sum, trace.rows))
    assert curve.kept[0] == kept
    assert max(row[2] for row in curve.rows[0]) == sum(p.nbytes for p in model.parameters() if p.requires_grad)


def test_what_is_kept_is_what_autograd_saves() -> None:
    task = make("words")
    tracer = Tracer(task, FakeModel(task, "fp32"), few_samples(task), "fp32", on_gpu=False)
    model, data = task.model(), repeat_rows(few_samples(task), SIZE)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    seen: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = task.loss(model, data) * 1.0
    others = [loss, *tensors_in(data)]  # alive as well when backward begins
    seen |= {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in others}
    kept = sum(storage.nbytes() for key, storage in seen.items() if key not in weights)
    curve = tracer.curve(SIZE, PassKind())
    assert curve.kept_at(SIZE) == kept


def test_copies_of_weights_and_bytes_at_a_size_that_was_not_counted_are_those_that_would_be() -> None:
    task = make("words")
    tracer = Tracer(task, FakeModel(task, "bf16"), few_samples(task), "bf16")
    weights = [layer.weight for layer in task.model().modules() if isinstance(layer, nn.Linear)]
    few = tracer.curve(4, PassKind())
    many = tracer.curve(40, PassKind())
    assert max(casts for _, casts, _ in few.rows[0]) == 2 * sum(weight.numel() for weight in weights)
    load = Load(gradient_bytes=max(row[2] for row in many.rows[0]))
    assert few.peak(40, load) == many.peak(40, load)
    assert few.largest(many.peak(40, load), load) == 40
    assert few.largest(many.peak(40, load) - 1, load) == 39


def test_a_gpu_keeps_no_scores_of_attention_and_computes_norms_in_full_precision() -> None:
    task = make("words")
    batch = few_samples(task)
    on_gpu, on_cpu = (
        Tracer(task, FakeModel(task, "bf16"), batch, "bf16", on_gpu=on_gpu).curve(SIZE, PassKind(is_sharded=True))
        for on_gpu in (True, False)
    )
    # Of every norm a copy of its input in float32, and its output, which a CPU leaves in bf16.
    assert on_gpu.kept[0] > on_cpu.kept[0]
    dropped = words(dropout=0.1)
    scores, none = (
        Tracer(dropped, FakeModel(dropped, "fp32"), batch, "fp32", on_gpu=on_gpu).curve(SIZE, PassKind())
        for on_gpu in (False, True)
    )
    num_scores = 2 * SIZE * 4 * 16 * 16  # layers × samples × heads × length × length
    assert scores.kept[0] - none.kept[0] > 4 * num_scores


class Pooled(Convolutions):
    """A norm of stormo's own, whose output is averaged over all pixels."""

    def model(self) -> nn.Module:
        """As the class says."""
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), NormAct(4), Mean(), nn.Linear(4, 3))


class Mean(nn.Module):
    """Over all pixels."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] -> [n, channels]."""
        return x.mean((2, 3))


def test_a_fused_norm_copies_a_gradient_that_is_not_in_rows_of_channels() -> None:
    task = Pooled(NoOptions())
    tracer = Tracer(task, FakeModel(task, "fp32"), few_samples(task), "fp32")
    fused = tracer.curve(SIZE, PassKind(channels_last=True))
    activation = 4 * SIZE * 4 * 8 * 8
    # Its input is kept; at the worst moment there are the gradient of its output, the copy, and that of its input.
    most = max(other for other, _, _ in fused.rows[0])
    assert 4 * activation <= most < 5 * activation


def test_a_loss_that_reads_values_is_not_known() -> None:
    task = ReadsValues(NoOptions())
    tracer = Tracer(task, FakeModel(task, "fp32"), few_samples(task), "fp32")
    with pytest.raises(UntraceableError, match="depends on values, as with a mask"):
        tracer.curve(2, PassKind())
