"""--init-from: what is taken from which file, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from stormo.config import options
from stormo.config.schema import ResolvedBatch
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.training.initial_weights import load_initial, read_initial
from stormo.training.trainer import Trainer
from tests.sharded_models import Plain
from tests.tiny_run import build, save

Ranks = Callable[..., list[Any]]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: tensor + 1 for name, tensor in _model().state_dict().items()}


@pytest.mark.parametrize(
    "write",
    [
        lambda weights, file: safetensors.torch.save_file(weights, file.with_suffix(".safetensors")),
        torch.save,
        lambda weights, file: torch.save({"epoch": 3, "state_dict": weights}, file),
        lambda weights, file: torch.save({"model": {f"module.{n}": t for n, t in weights.items()}}, file),
    ],
    ids=["safetensors", "torch", "nested", "of DDP"],
)
def test_all_kinds_of_files_are_taken(weights: Any, write: Any, tmp_path: Path) -> None:
    write(weights, tmp_path / "weights.pt")
    (file,) = tmp_path.iterdir()
    model = _model()
    text = load_initial(model, read_initial(str(file), "runs"), "F")
    assert text == "--init-from F: 9 of the model's 9 tensors were taken."
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_what_does_not_fit_is_named_and_left_alone(weights: dict[str, torch.Tensor]) -> None:
    del weights["0.bias"]
    weights |= {"2.weight": torch.zeros(7, 4), "2.bias": torch.zeros(7), "old.weight": torch.zeros(1)}
    model = _model()
    before = model[2].weight.detach().clone()  # type: ignore[index]
    assert load_initial(model, weights, "F") == (
        "--init-from F: 6 of the model's 9 tensors were taken; 1 not in it (0.bias); 2 of another shape or type "
        "(2.weight, 2.bias); 1 left over (old.weight)."
    )
    assert torch.equal(model[0].weight, weights["0.weight"])  # type: ignore[index]
    assert torch.equal(model[2].weight, before)  # type: ignore[index]


def test_nothing_that_fits_is_refused(weights: dict[str, torch.Tensor]) -> None:
    with pytest.raises(SettingError) as refused:
        load_initial(_model(), {f"backbone.{name}": tensor for name, tensor in weights.items()}, "F")
    assert str(refused.value) == (
        "--init-from F was set, but it holds 9 tensors (backbone.0.weight, backbone.0.bias, backbone.1.weight and 6 "
        "more), of which none fits the model (0.weight, 0.bias, 1.weight and 6 more); name the weights of such a "
        "model, or leave it out."
    )


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file or run"),
        (b"no weights", "it cannot be read: it is no file of torch"),
        (b"hello world", "it cannot be read: it is no file of torch"),
        (b"", "it cannot be read: it is no file of torch"),
        (
            {"weights": _Evil()},
            "it cannot be read: it is no file of torch with tensors and plain values alone; save it",
        ),
        ({"epoch": 3}, "it holds no dense tensors by name"),
        ({0: torch.zeros(2)}, "it holds no dense tensors by name"),
        ({"0.bias": torch.zeros(4).to_sparse()}, "it holds no dense tensors by name"),
        ([torch.zeros(2)], "it holds no dense tensors by name"),
    ],
)
def test_a_file_without_weights_is_refused_and_nothing_is_run(
    content: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(SettingError) as refused:
        read_initial(str(file), "runs")
    assert str(refused.value).startswith(f"--init-from {file} was set, but {said}")
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "x" * 300])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match="there is no file or run of such a name"):
        read_initial(name, "runs")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.int64])
def test_weights_of_another_kind_of_number_are_not_taken(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    weights["2.bias"] = weights["2.bias"].to(dtype)
    assert "; 1 of another shape or type (2.bias)" in load_initial(_model(), weights, "F")


class Started(Plain):
    """Its model starts from a run, which rank 0 alone reads."""

    source = ""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        if torch.distributed.get_rank() == 0:
            read = read_initial(self.source, "runs")
            self._initialise = lambda model: load_initial(model, read, "F") and None


def _saved(world: World, folder: str) -> str:
    torch.manual_seed(5)
    parts = build(world, task_class=Plain, precision="fp64", seed=7)
    return save(parts, folder)


def _started(world: World, folder: str, flags: dict[str, Any]) -> Any:
    task = partial(type("Own", (Started,), {"source": folder}))
    parts = build(world, task_class=task, precision="fp64", **flags)  # type: ignore[arg-type]
    return [(s.name, s.offset, s.local.detach().numpy().copy()) for s in parts.strategy.shards()]


@pytest.mark.parametrize("strategy", ["ddp", "local", "server", "fsdp", "pipeline"])
def test_all_workers_start_from_what_rank_0_reads(run_ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    run_ranks(_saved, 1, str(tmp_path / "checkpoints"))
    expected = read_initial(str(tmp_path), "runs")
    flags = {"strategy": strategy, **({"average_every": "2"} if strategy == "local" else {})}
    for shards in run_ranks(_started, 2, str(tmp_path), flags):
        for name, offset, values in shards:
            place = tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))
            assert np.array_equal(values, expected[name].numpy()[place]), name


def test_a_resume_does_not_load_again() -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.world, trainer.task = World(alone(), torch.device("cpu")), Plain()
    new = options.make_config({"init_from": "nowhere"}, None)
    resumed = ResolvedBatch(global_batch_size=8, learning_rate=0.1, warmup_start=0.1)
    trainer.config = replace(new, resumed=resumed)
    trainer._read_initial()
    assert trainer.task._initialise is None
    trainer.config = new
    with pytest.raises(SettingError, match="there is no such file or run"):
        trainer._read_initial()
