"""Messages between a weight updater and an engine's workers: manifest, buckets, checksums.

An update consists of ``connect`` (once), ``start``, one ``bucket`` message per bucket, and ``finish``. All messages are
plain JSON, except for the tensors:

- connect: ``{"transport": name, "options": {...}, "manifest": [[name, dtype, shape], ...], "staged": bool, "checksum":
  kind}``, with a kind of :data:`~torchrl_rloo.weight_update.checksums.CHECKSUMS`, ``"xxh3"`` by default
- start: ``{"version": int, "verify": bool}``, with ``verify`` if all buckets have a checksum, which is the default
- bucket: ``{"version": int, "bucket": int, "first": int, "last": int, "checksum": str | None, "payload": {...}}``, with
  the tensors ``first`` to ``last - 1`` of the manifest
- finish: ``{"version": int}``, the version of the buckets
- adapter: ``{"version": int, "path": str, "checksum": str}``, with a directory in peft's format and the checksum of its
  tensors sorted by name

The report of ``finish`` is ``{"rank": int, "version": int, "checksums": [str | None, ...], "tensors": int}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

ADAPTER_FILE = "adapter_model.safetensors"  # peft's name
ALIGNMENT = 64  # bytes; the offset of a view must be a multiple of its element size


class TensorInfo(NamedTuple):
    """Name, dtype (such as ``"bfloat16"``) and shape of a tensor to send."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorInfo:
        """Describe a tensor, as it is or cast to ``dtype``."""
        return cls(name, str(dtype or tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype as a ``torch.dtype``."""
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


def read_manifest(info: Mapping[str, Any]) -> list[TensorInfo]:
    """Return the manifest in the message of ``connect``."""
    return [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in info["manifest"]]


def plan_buckets(manifest: Sequence[TensorInfo], bucket_bytes: int) -> list[tuple[int, int]]:
    """Split a manifest into consecutive buckets of at most ``bucket_bytes`` each; a larger tensor is one bucket.

    Returns:
        ``(first, last)`` of each bucket, which contains the tensors ``first`` to ``last - 1``.

    Raises:
        ValueError: if ``bucket_bytes`` is below 1 or the manifest is empty.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
    if not manifest:
        raise ValueError("manifest=[] must have at least one tensor")
    buckets, first, filled = [], 0, 0
    for i, info in enumerate(manifest):
        size = _align(info.nbytes)
        if i > first and filled + size > bucket_bytes:
            buckets.append((first, i))
            first, filled = i, 0
        filled += size
    return [*buckets, (first, len(manifest))]


def packed_size(infos: Sequence[TensorInfo]) -> int:
    """Return the number of bytes that :func:`pack` needs."""
    return sum(_align(info.nbytes) for info in infos)


def pack(tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy tensors one after the other into ``buffer`` (uint8, ``[nbytes]``), which may be on another device."""
    infos = [TensorInfo.of("", t) for t in tensors]
    for view, tensor in zip(unpack(buffer, infos), tensors, strict=True):
        view.copy_(tensor)


def unpack(buffer: torch.Tensor, infos: Sequence[TensorInfo]) -> list[torch.Tensor]:
    """Return views of the tensors in a packed buffer (uint8, ``[nbytes]``)."""
    views, offset = [], 0
    for info in infos:
        views.append(buffer[offset : offset + info.nbytes].view(info.torch_dtype).view(info.shape))
        offset += _align(info.nbytes)
    return views


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
