"""The words that a weight updater and an engine's workers exchange: manifest, buckets, checksums.

An update is ``connect`` (once), ``start``, ``bucket`` for each bucket, ``finish``. Everything but the tensors is plain
JSON, whatever carries it:

- connect: ``{"transport": name, "options": {...}, "manifest": [[name, dtype, shape], ...], "staged": bool}``
- bucket: ``{"version": int, "bucket": int, "first": int, "last": int, "checksum": str, "payload": {...}}``: the tensors
  ``first`` to before ``last`` of the manifest
- finish: ``{"version": int}``, that of the buckets
- adapter: ``{"version": int, "path": str, "checksum": str}``: a directory in peft's format, and the checksum of its
  tensors in the order of their names
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from xxhash import xxh3_64

ADAPTER_FILE = "adapter_model.safetensors"  # peft's name
ALIGNMENT = 64  # bytes; a view needs its offset to be a multiple of its element size


class TensorInfo(NamedTuple):
    """Name, dtype (as in ``"bfloat16"``) and shape of a tensor to send."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorInfo:
        """Describes a tensor, as it is or as it will be cast."""
        return cls(name, str(dtype or tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


def plan_buckets(manifest: Sequence[TensorInfo], bucket_bytes: int) -> list[tuple[int, int]]:
    """Consecutive ``(first, last)`` of the manifest, of at most ``bucket_bytes`` each where a tensor alone is not more.

    Raises:
        ValueError: if ``bucket_bytes`` is below 1, or the manifest is empty.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
    if not manifest:
        raise ValueError("there are no tensors to send")
    buckets, first, filled = [], 0, 0
    for i, info in enumerate(manifest):
        size = _aligned(info.nbytes)
        if i > first and filled + size > bucket_bytes:
            buckets.append((first, i))
            first, filled = i, 0
        filled += size
    return [*buckets, (first, len(manifest))]


def packed_size(infos: Sequence[TensorInfo]) -> int:
    """Bytes that :func:`pack` needs."""
    return sum(_aligned(info.nbytes) for info in infos)


def pack(tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copies tensors one after the other into ``buffer`` (uint8), on whatever devices they are."""
    infos = [TensorInfo.of("", t) for t in tensors]
    for view, tensor in zip(unpack(buffer, infos), tensors, strict=True):
        view.copy_(tensor)


def unpack(buffer: torch.Tensor, infos: Sequence[TensorInfo]) -> list[torch.Tensor]:
    """Views of a packed buffer (uint8)."""
    views, offset = [], 0
    for info in infos:
        views.append(buffer[offset : offset + info.nbytes].view(info.torch_dtype).view(info.shape))
        offset += _aligned(info.nbytes)
    return views


def checksum(tensors: Sequence[torch.Tensor]) -> str:
    """XXH3-64 of the bytes of tensors, in order: far faster than the copy that it guards. A GPU's are copied first."""
    digest = xxh3_64()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
