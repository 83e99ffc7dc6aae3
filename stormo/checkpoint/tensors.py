"""Tensors as bytes: the digest of a set of weights, and the safetensors format.

The safetensors package reads whole files. It cannot write them piece by piece, nor hash what it writes: `Encoded` does,
straight from the tensors' memory, so that a large model is not held twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from stormo.errors import StormoError

# The limit of the format: readers refuse a longer header.
MAX_HEADER_BYTES = 100_000_000

_PIECE_BYTES = 64 * 1024 * 1024
_METADATA = "__metadata__"  # the format's name for what is no tensor

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and little-endian values in order of name; strides and device do not count.

    Per tensor, the JSON text `[name, dtype, shape]`, a line feed, then the values, last dimension fastest.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        # Two different sets never give the same bytes: JSON ends itself, dtype and shape fix the number of bytes.
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        for piece in _pieces(name, tensor):
            digest.update(piece)
    return digest.hexdigest()


class Encoded:
    """Tensors laid out as one safetensors file; iterating gives its bytes, piece by piece.

    If `digests` is a dictionary, iterating puts the SHA-256 of each tensor's values there.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        self.digests: dict[str, str] | None = None
        # Widest elements first, so that every tensor is aligned in the file; the name makes the order unique.
        self._tensors = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        header: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
        offset = 0
        for name, tensor in self._tensors:
            require_plain(name, tensor)
            if name == _METADATA:
                raise StormoError("A tensor is named __metadata__, which the safetensors format reserves.")
            if tensor.dtype not in DTYPE_NAMES:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
                raise StormoError(
                    f"The tensor {name} has dtype {tensor.dtype}, which the safetensors format has no name for; "
                    f"a checkpoint can hold: {known}."
                )
            end = offset + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise StormoError(
                f"The names and shapes of {len(header):,} tensors take {len(text):,} bytes, but a safetensors header "
                f"holds {MAX_HEADER_BYTES:,} bytes at most."
            )
        self._head = len(text).to_bytes(8, "little") + text
        self.size_bytes = len(self._head) + offset
        start = len(self._head)
        # The bytes of each tensor in the file: the first, and the one after the last.
        self.spans = {
            name: (start + entry["data_offsets"][0], start + entry["data_offsets"][1])
            for name, entry in header.items()
            if name != _METADATA
        }

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self._head
        for name, tensor in self._tensors:
            if self.digests is None:
                yield from _pieces(name, tensor)
                continue
            digest = hashlib.sha256()
            for piece in _pieces(name, tensor):
                digest.update(piece)
                yield piece
            self.digests[name] = digest.hexdigest()


def decode(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file held in memory; a `ValueError` says what is wrong with it."""
    header_length(data[:8], len(data))
    try:
        return safetensors.torch.load(data)
    # KeyError: a dtype unknown to the package. AssertionError: a shape that contradicts an empty tensor.
    except (safetensors.SafetensorError, KeyError, AssertionError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"it is not a valid safetensors file ({type(error).__name__}: {error})") from error


def header_length(first: bytes, size_bytes: int) -> int:
    """The header length in the first 8 bytes of a safetensors file, refused if it cannot be right."""
    if size_bytes < 8:
        raise ValueError(f"it is {size_bytes} bytes long, too short for the 8 bytes that give the header's length")
    length = int.from_bytes(first, "little")
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise ValueError(
            f"it claims a header of {length:,} bytes, but {size_bytes - 8:,} bytes follow "
            f"and a header holds {MAX_HEADER_BYTES:,} at most"
        )
    return length


def from_bytes(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor of these little-endian values; it shares the memory of `data`."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def require_plain(name: str, tensor: Tensor) -> None:
    """Refuse tensors whose values are not plainly in memory."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise StormoError(f"The tensor {name} is sparse or quantized; make it dense before it is stored.")
    if tensor.device.type == "meta":
        raise StormoError(f"The tensor {name} is on the meta device and has no values to store.")
    # A DTensor or another wrapper holds only a part of its values, or holds them in another form.
    if hasattr(tensor, "__tensor_flatten__"):
        raise StormoError(f"The tensor {name} is a {type(tensor).__name__}; gather it to a plain tensor first.")


def _pieces(name: str, tensor: Tensor) -> Iterator[memoryview]:
    """The values as little-endian bytes; a contiguous CPU tensor is not copied."""
    require_plain(name, tensor)
    if tensor.numel() == 0:
        return
    # The memory of a conjugated or negated view holds the original values.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    view = plain.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(view), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]
