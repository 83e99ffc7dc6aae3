"""Digests and the safetensors format."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stormo.checkpoint import tensors as module
from stormo.checkpoint import weights_digest
from stormo.checkpoint.tensors import Encoded, decode
from stormo.errors import StormoError

DTYPES = list(module.DTYPE_NAMES)


@st.composite
def tensors_of_any_kind(draw: Any) -> dict[str, Tensor]:
    tensors = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=12), max_size=6, unique=True)):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if dtype is torch.bool:
            values = draw(st.lists(st.integers(0, 1), min_size=num_bytes, max_size=num_bytes))
        else:  # any bit pattern: NaN payloads, infinities and negative zero must survive
            values = list(draw(st.binary(min_size=num_bytes, max_size=num_bytes)))
        tensor = torch.tensor(values, dtype=torch.uint8).view(dtype).reshape(shape)
        if draw(st.booleans()) and tensor.dim() >= 2:
            tensor = tensor.transpose(0, 1)
        tensors[name] = tensor
    return tensors


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(tensors_of_any_kind())
def test_every_dtype_shape_and_bit_pattern_survives(tensors: dict[str, Tensor]) -> None:
    encoded = Encoded(tensors)
    data = b"".join(encoded)
    assert len(data) == encoded.size_bytes
    # The package's own reader, and ours.
    for read in (safetensors.torch.load(data), decode(data)):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            assert read[name].shape == tensor.shape
            assert raw(read[name]) == raw(tensor)
    assert weights_digest(decode(data)) == weights_digest(tensors)


def test_the_bytes_do_not_depend_on_the_order_of_the_names() -> None:
    a, b = torch.ones(3), torch.zeros(2, dtype=torch.int64)
    assert b"".join(Encoded({"a": a, "b": b})) == b"".join(Encoded({"b": b, "a": a}))
    assert weights_digest({"a": a, "b": b}) == weights_digest({"b": b, "a": a})


def test_every_tensor_is_aligned_to_its_element_size_in_the_file() -> None:
    tensors = {
        "a": torch.ones(3, dtype=torch.uint8),
        "b": torch.ones(3, dtype=torch.int64),
        "c": torch.ones(3, dtype=torch.float16),
    }
    data = b"".join(Encoded(tensors))
    for tensor in tensors.values():
        assert data.index(raw(tensor)) % tensor.element_size() == 0


def test_the_digest_is_what_its_description_says() -> None:
    tensors = {"b": torch.tensor(2.0, dtype=torch.float64), "a": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)}
    stream = b'["a", "torch.int32", [2, 2]]\n' + np.array([1, 2, 3, 4], "<i4").tobytes()
    stream += b'["b", "torch.float64", []]\n' + np.array(2.0, "<f8").tobytes()
    assert weights_digest(tensors) == hashlib.sha256(stream).hexdigest()


def test_the_digest_ignores_memory_format_strides_and_gradients() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    digest = weights_digest({"w": tensor})
    same = [
        tensor.to(memory_format=torch.channels_last),
        torch.nn.Parameter(tensor.clone()),
        tensor.transpose(0, 3).contiguous().transpose(0, 3),
        torch.cat([tensor, tensor])[2:],
        tensor.neg().neg(),
    ]
    assert [weights_digest({"w": other}) for other in same] == [digest] * len(same)


def test_the_digest_sees_the_values_of_lazily_conjugated_and_negated_views() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert weights_digest({"z": z.conj()}) == weights_digest({"z": z.conj().resolve_conj()})
    assert weights_digest({"z": z.conj()}) != weights_digest({"z": z})
    imaginary = z.conj().imag
    assert imaginary.is_neg()
    assert weights_digest({"z": imaginary}) == weights_digest({"z": imaginary.clone()})
    assert torch.equal(decode(b"".join(Encoded({"z": z.conj()})))["z"], z.conj())


def test_the_digest_sees_a_change_of_name_dtype_shape_or_one_bit() -> None:
    tensor = torch.zeros(4, dtype=torch.int32)
    flipped = tensor.clone()
    flipped[3] = 1
    variants = [
        {"w": tensor},
        {"v": tensor},
        {"w": tensor.view(torch.float32)},
        {"w": tensor.reshape(2, 2)},
        {"w": flipped},
        {"w": -0.0 * torch.ones(4)},
        {"w": tensor, "v": torch.empty(0)},
        {},
    ]
    assert len({weights_digest(variant) for variant in variants}) == len(variants)


def test_a_tensor_longer_than_one_piece_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.arange(100), "b": torch.rand(7)}
    digest, data = weights_digest(tensors), b"".join(Encoded(tensors))
    monkeypatch.setattr(module, "_PIECE_BYTES", 5)
    assert weights_digest(tensors) == digest
    assert b"".join(Encoded(tensors)) == data


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.arange(1000)
    pieces = list(module._pieces("w", tensor))
    assert np.frombuffer(pieces[0], dtype=np.int64).ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
    ],
)
def test_tensors_that_cannot_be_stored_are_refused_by_name(tensor: Tensor, words: str) -> None:
    with pytest.raises(StormoError, match=rf"layer\.weight.*{words}"):
        Encoded({"layer.weight": tensor})


def test_a_wrapped_tensor_is_refused_because_its_memory_is_not_its_value() -> None:
    class Wrapped(Tensor):
        def __tensor_flatten__(self) -> None: ...

    with pytest.raises(StormoError, match="shard is a Wrapped; gather it"):
        weights_digest({"shard": torch.zeros(3).as_subclass(Wrapped)})


def test_the_reserved_name_is_refused() -> None:
    with pytest.raises(StormoError, match="__metadata__"):
        Encoded({"__metadata__": torch.zeros(1)})


def test_a_header_that_no_reader_would_accept_is_refused_before_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", 100)
    Encoded({"a": torch.zeros(1)})
    with pytest.raises(StormoError, match="2 tensors take"):
        Encoded({"a": torch.zeros(1), "b": torch.zeros(1)})


def header_file(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too short"),
        (b"\0" * 7, "too short"),
        (b"\xff" * 8 + b"{}", "claims a header of 18,446,744,073,709,551,615 bytes"),
        ((1000).to_bytes(8, "little") + b"{}", "claims a header of 1,000 bytes, but 2 bytes follow"),
        (header_file(b"not json"), "not a valid safetensors file"),
        (header_file(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"\0" * 4), "not a valid"),
        (header_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}', b"\0" * 12), "not a valid"),
        (header_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 8), "not a valid"),
        (header_file(b'{"a":{"dtype":"X9","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4), "not a valid"),
        (header_file(b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'), "not a valid"),
        (header_file(b"[" * 100_000), "not a valid"),
    ],
)
def test_malformed_files_are_refused_with_a_reason(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(data)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_digest_and_the_file_are_the_same_from_any_device() -> None:
    tensors = {"w": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last), "n": torch.tensor(3)}
    moved = {name: tensor.cuda() for name, tensor in tensors.items()}
    assert weights_digest(moved) == weights_digest(tensors)
    assert b"".join(Encoded(moved)) == b"".join(Encoded(tensors))
