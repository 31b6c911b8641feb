"""Tests of the protocol of weight updates: every tensor is in one bucket and arrives bit-identical."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.gpu import needs_gpu
from torchrl_rloo.weight_update import protocol
from torchrl_rloo.weight_update.protocol import (
    CHECKSUMS,
    TensorInfo,
    device_sum,
    pack,
    packed_size,
    plan_buckets,
    unpack,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)  # includes scalars and empty tensors


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bytes, or of zeros and ones if the dtype does not allow all bytes."""
    infinite = torch.Generator().manual_seed(seed)
    nbytes = TensorInfo("", str(dtype).removeprefix("torch."), shape).nbytes
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (nbytes,), dtype=torch.uint8, generator=infinite).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


TENSORS = st.lists(st.builds(filled, SHAPES, st.sampled_from(DTYPES), st.integers(0, 1000)), min_size=1, max_size=6)


@settings(deadline=None)
@given(TENSORS)
def test_packed_tensors_come_out_bit_for_bit(tensors: list[torch.Tensor]):
    infos = [TensorInfo.of(str(i), t) for i, t in enumerate(tensors)]
    buffer = torch.full((packed_size(infos) + 3,), 255, dtype=torch.uint8)
    pack(tensors, buffer)
    assert (buffer[packed_size(infos) :] == 255).all()
    views = unpack(buffer, infos)
    for view, tensor in zip(views, tensors, strict=True):
        assert view.dtype == tensor.dtype and view.shape == tensor.shape
        assert torch.equal(bytes_of(view), bytes_of(tensor))
    for checksum in CHECKSUMS.values():
        assert checksum(views) == checksum(tensors)


def test_tensors_that_are_not_contiguous_are_packed_by_value():
    tensor = torch.arange(12.0).view(3, 4)
    for view in (tensor.T, tensor[:, ::2], tensor[0].expand(3, 4)):
        infos = [TensorInfo.of("x", view)]
        buffer = torch.empty(packed_size(infos), dtype=torch.uint8)
        pack([view], buffer)
        assert torch.equal(unpack(buffer, infos)[0], view)
        for checksum in CHECKSUMS.values():
            assert checksum([view]) == checksum([view.contiguous()])


INFOS = st.lists(st.builds(TensorInfo, st.text(max_size=3), st.sampled_from(["float32", "bool"]), SHAPES), min_size=1)


@given(INFOS, st.integers(1, 2000))
def test_every_tensor_is_in_one_bucket(infos: list[TensorInfo], limit: int):
    buckets = plan_buckets(infos, limit)
    assert [i for first, last in buckets for i in range(first, last)] == list(range(len(infos)))
    for first, last in buckets:
        assert last == first + 1 or packed_size(infos[first:last]) <= limit
    for (first, last), (_, later) in zip(buckets, buckets[1:], strict=False):
        assert packed_size(infos[first : last + 1]) > limit, f"bucket {first, last} had room for more, up to {later}"


@pytest.mark.parametrize("kind", CHECKSUMS)
@settings(deadline=None)
@given(TENSORS, st.data())
def test_any_flipped_bit_changes_the_checksum(kind: str, tensors: list[torch.Tensor], data: st.DataObject):
    checksum = CHECKSUMS[kind]
    filled = [t for t in tensors if t.numel() and t.dtype != torch.bool]
    if filled:
        before, bytes_ = checksum(tensors), bytes_of(data.draw(st.sampled_from(filled)))
        place, bit = data.draw(st.integers(0, len(bytes_) - 1)), data.draw(st.integers(0, 7))
        bytes_[place] ^= 1 << bit
        assert checksum(tensors) != before
        bytes_[place] ^= 1 << bit
        assert checksum(tensors) == before


@pytest.mark.parametrize("kind", CHECKSUMS)
def test_the_order_of_tensors_rows_and_values_counts(kind: str):
    checksum, a = CHECKSUMS[kind], torch.arange(12.0).view(3, 4)
    found = [checksum(each) for each in ([a, a + 1], [a + 1, a], [a.flip(0), a + 1], [a.flip(1), a + 1], [a])]
    assert len(set(found)) == 5
    assert checksum([torch.zeros(4)]) != checksum([torch.zeros(5)])


def test_the_device_checksum_does_not_depend_on_alignment_or_chunks(monkeypatch: pytest.MonkeyPatch):
    tensor = torch.arange(1000).bfloat16()
    expected = device_sum([tensor])
    shifted = torch.cat([tensor[:1], tensor])[1:]  # at an offset of two bytes
    assert device_sum([shifted]) == expected
    monkeypatch.setattr(protocol, "_CHUNK", 7)
    assert device_sum([tensor]) == expected == "ecd4b45990898648"


@needs_gpu
def test_the_device_checksum_is_the_same_on_a_gpu():
    tensors = [torch.randn(1000, 77), torch.randn(33).bfloat16(), torch.arange(7)]
    assert device_sum([t.cuda() for t in tensors]) == device_sum(tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_manifest_survives_json(dtype: torch.dtype):
    info = TensorInfo.of("x.weight", torch.empty(2, 3), dtype)
    name, dtype_name, shape = json.loads(json.dumps(info))
    again = TensorInfo(name, dtype_name, tuple(shape))
    assert again == info and again.torch_dtype == dtype and again.nbytes == 6 * dtype.itemsize


def test_buckets_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        plan_buckets([TensorInfo("x", "float32", (2,))], 0)
    with pytest.raises(ValueError, match="at least one tensor"):
        plan_buckets([], 10)
