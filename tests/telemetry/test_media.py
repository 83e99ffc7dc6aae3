from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from stormo.errors import SettingError
from stormo.telemetry.folder import RunFolder
from stormo.telemetry.media import log_value, png_size
from tests.telemetry.test_tensorboard import read_back, started, write_file

PIXELS = numpy.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=numpy.uint8)


@pytest.mark.parametrize(
    "value", [0.5, numpy.float32(0.5), torch.tensor(0.5, requires_grad=True), torch.tensor([[0.5]]), numpy.array([0.5])]
)
def test_numbers(tmp_path: Path, value: Any) -> None:
    record = log_value(RunFolder(tmp_path), "a/b", value, 3)
    assert (record.name, record.step, record.value, record.file) == ("a/b", 3, 0.5, None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (PIXELS, PIXELS),
        (torch.from_numpy(PIXELS).permute(2, 0, 1), PIXELS),
        (PIXELS[:3], PIXELS[:3]),  # 3 × 7 × 3: an array is HWC
        (torch.from_numpy(PIXELS[:3]).permute(2, 0, 1).contiguous()[:, :, :3], PIXELS[:3, :3]),  # a tensor is CHW
        (PIXELS[..., 0], PIXELS[..., 0]),
        (PIXELS[None, ..., 0], PIXELS[..., 0]),
        (numpy.dstack([PIXELS, PIXELS[..., 0]]), numpy.dstack([PIXELS, PIXELS[..., 0]])),
    ],
)
def test_images_come_back_as_they_were(tmp_path: Path, value: Any, expected: Any) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    record = log_value(RunFolder(tmp_path), "samples/train", value, 12)
    assert record.file == "media/samples/train-00000012.png"
    png = (tmp_path / record.file).read_bytes()
    assert numpy.array_equal(numpy.asarray(image.open(io.BytesIO(png))), expected)
    assert png_size(png) == (expected.shape[1], expected.shape[0])


def test_a_figure_and_an_image_in_tensorboard(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed")
    folder = RunFolder(tmp_path)
    figure = figures.Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 2])
    records = [log_value(folder, "curve", figure, 1), log_value(folder, "sample", PIXELS, 2)]
    write_file(folder.tensorboard, [started(), *records, log_value(folder, "mine", 0.25, 2)])
    found = read_back(folder.tensorboard)
    (curve,), (sample,) = found.Images("curve"), found.Images("sample")
    assert (curve.width, curve.height, sample.width, sample.height) == (100, 50, 7, 5)
    assert sample.encoded_image_string == (tmp_path / str(records[1].file)).read_bytes()
    assert [(each.step, each.value) for each in found.Scalars("mine")] == [(2, 0.25)]


@pytest.mark.parametrize(
    "value", [PIXELS / 255, PIXELS[..., :2], "text", None, [1, 2], torch.zeros(2, 2), PIXELS[:0], 10**400]
)
def test_anything_else_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SettingError, match="it takes a number, an image of uint8"):
        log_value(RunFolder(tmp_path), "a", value, 1)
    assert not (tmp_path / "media").exists()


@pytest.mark.parametrize("name", ["", "../a", "a//b", "/a", "a/.b", "a\nb", "ä", "a/" + 201 * "b"])
def test_names_that_some_tool_refuses(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError, match="names are letters"):
        log_value(RunFolder(tmp_path), name, 1.0, 1)
