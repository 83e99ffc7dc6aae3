"""What a training logs by name: numbers, images and figures; pictures are stored as PNG files in the run folder."""

from __future__ import annotations

import io
import re
import struct
import zlib
from typing import Any

from stormo.errors import SettingError
from stormo.system.files import make_folder
from stormo.telemetry.folder import RunFolder, write_whole
from stormo.telemetry.record import ValueLogged

_NAME = re.compile(r"[\w-][\w .-]*(/[\w-][\w .-]*)*", flags=re.ASCII)  # what every tool and file system takes
_LONGEST_PART = 200  # of a name, as file systems take 255
_PNG_COLOURS = {1: 0, 3: 2, 4: 6}  # channels → colour type: grey, RGB, RGBA


def log_value(folder: RunFolder, name: Any, value: Any, step: int) -> ValueLogged:
    """The record of a number, an image (uint8, HWC or CHW) or a matplotlib figure, whose picture is then stored."""
    is_name = isinstance(name, str) and _NAME.fullmatch(name)
    if not is_name or max(map(len, name.split("/"))) > _LONGEST_PART:
        raise SettingError(
            f"log({name!r}) was called",
            f"names are letters, digits and _-. in parts of at most {_LONGEST_PART} characters that / separates",
            "choose one like validation/samples",
        )
    number = _number(value)
    if number is not None:
        return ValueLogged(name=name, step=step, value=number)
    path = folder.media / f"{name}-{step:08d}.png"
    picture = _picture(name, value)
    make_folder(path.parent)
    write_whole(path, picture)
    return ValueLogged(name=name, step=step, file=str(path.relative_to(folder.path)))


def _number(value: Any) -> float | None:
    value = value.detach() if hasattr(value, "detach") else value  # a tensor
    num_values = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
    if num_values != 1 or hasattr(value, "savefig"):
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError):
        return None


def _picture(name: str, value: Any) -> bytes:
    if hasattr(value, "savefig"):
        buffer = io.BytesIO()
        value.savefig(buffer, format="png")
        return buffer.getvalue()
    is_tensor = hasattr(value, "detach")
    pixels = value.detach().cpu().numpy() if is_tensor else value
    shape = tuple(getattr(pixels, "shape", ()))
    if len(shape) == 2:
        pixels, shape = pixels[..., None], (*shape, 1)
    is_image = len(shape) == 3 and 0 not in shape and str(pixels.dtype) == "uint8"
    has_last, has_first = is_image and shape[2] in _PNG_COLOURS, is_image and shape[0] in _PNG_COLOURS
    if not (has_last or has_first):
        what = f"a {type(value).__name__}" + (f" of {pixels.dtype} and shape {shape}" if shape else "")
        raise SettingError(
            f"log({name!r}) was called with {what}",
            "it takes a number, an image of uint8 with 1, 3 or 4 channels (HWC or CHW), or a figure of matplotlib",
            "convert it first, an image in [0, 1] by (255 * image).byte()",
        )
    if has_first and (is_tensor or not has_last):  # where both would do, tensors are CHW and arrays HWC
        pixels = pixels.transpose(1, 2, 0)
    return _png(pixels)


def _png(pixels: Any) -> bytes:
    """An HWC array as PNG, without a library for images."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: the row is stored unfiltered

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOURS[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def png_size(png: bytes) -> tuple[int, int]:
    """Width and height of a PNG file."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height
