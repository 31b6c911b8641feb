"""Checksums of weights: XXH3 on the host, or an integer sum on the device of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from xxhash import xxh3_64

_CHUNK = 1 << 22  # words that are hashed at a time, to bound the temporary memory
_POSITION = -7046029254386353131  # odd 64-bit constants of SplitMix64, as signed integers
_MIX = -4658895280553007687
_FOLD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def xxh3(tensors: Sequence[torch.Tensor]) -> str:
    """Return the XXH3-64 of the tensors' bytes in order; copying GPU tensors takes far longer than the hash."""
    digest = xxh3_64()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def device_sum(tensors: Sequence[torch.Tensor]) -> str:
    """Return a checksum of the tensors' bytes in order, computed on the device of each tensor.

    Each word is mixed with its position before the words are summed in 64-bit integers. The sum therefore does not
    depend on the device or on the order of the addition, and a moved or changed word changes it.
    """
    sums = [_sum_words(tensor.detach()) for tensor in tensors]
    # Copy the sums of each device to the host at once, since each copy waits for the device
    totals: list[int] = [0] * len(sums)
    for device in {one.device for one in sums}:
        places = [i for i, one in enumerate(sums) if one.device == device]
        values = torch.stack([sums[i] for i in places]).tolist()
        for i, value in zip(places, values, strict=True):
            totals[i] = value
    digest = 0
    for total, tensor in zip(totals, tensors, strict=True):
        digest = (digest * _FOLD + total + tensor.nbytes + 1) & _MASK
    return f"{digest:016x}"


CHECKSUMS: dict[str, Callable[[Sequence[torch.Tensor]], str]] = {"xxh3": xxh3, "device": device_sum}


def _sum_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the mixed words of a tensor, ``[]`` in int64."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4 == 0:
        if data.storage_offset() % 4:
            data = data.clone()
        data = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, data.numel(), _CHUNK):
        words = data[start : start + _CHUNK].to(torch.int64)
        positions = torch.arange(start + 1, start + 1 + words.numel(), dtype=torch.int64, device=tensor.device)
        words += positions.mul_(_POSITION)
        words ^= words >> 31
        words *= _MIX
        words ^= words >> 29
        total += words.sum()
    return total
