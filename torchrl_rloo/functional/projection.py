"""Products with a large output projection, accumulated and kept in at least float32 whatever the weights are in.

Logits that were rounded to bfloat16 carry an error of up to 2^-9 of their size, and the sampler and the trainer each
round other sums. Both therefore multiply here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CAST_ELEMENTS = 2**18  # weights cast at once: 1 MiB in float32 stays in a core's cache


def accumulation_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The widest dtype of the tensors, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def widen(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``hidden`` as its products with ``weight`` want it: in ``dtype``, unless the device widens them by itself."""
    return hidden if _has_kernel(hidden, weight) else hidden.to(dtype)


def project(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``hidden @ weight.T`` in at least float32, without a gradient.

    Args:
        hidden: ``[n, H]``.
        weight: ``[V, H]``, perhaps of a narrower dtype; at most :data:`CAST_ELEMENTS` of it are cast at once.
        out: ``[n, V]``, where to write if it has the result's dtype; None for a new tensor.

    Returns:
        ``[n, V]``.
    """
    dtype = accumulation_dtype(hidden, weight)
    out = hidden.new_empty(len(hidden), len(weight), dtype=dtype) if out is None or out.dtype != dtype else out
    if _has_kernel(hidden, weight):
        return torch.mm(hidden, weight.T, out_dtype=dtype, out=out)
    hidden = hidden.to(dtype)
    if weight.dtype == dtype:
        return torch.mm(hidden, weight.T, out=out)
    for rows in _chunks(weight):
        torch.mm(hidden, weight[rows].to(dtype).T, out=out[:, rows])
    return out


def add_back(total: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> None:
    """Adds ``gradient @ weight``, the gradient of :func:`project` for ``hidden``, to ``total`` ``[n, H]``."""
    if gradient.dtype == weight.dtype:
        total.addmm_(gradient, weight)
    elif _has_kernel(weight, weight):
        total += torch.mm(gradient.to(weight.dtype), weight, out_dtype=gradient.dtype)
    else:
        for rows in _chunks(weight):
            total.addmm_(gradient[:, rows], weight[rows].to(gradient.dtype))


def add_outer(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Adds ``gradient.T @ hidden``, the gradient of :func:`project` for ``weight``, to ``total`` ``[V, H]``."""
    if hidden.dtype != total.dtype and _has_kernel(hidden, hidden):
        gradient = gradient.to(hidden.dtype)
        for rows in _chunks(total, 64 * CAST_ELEMENTS):  # bounds the product, which is as large as the weight
            total[rows] += torch.mm(gradient[:, rows].T, hidden, out_dtype=total.dtype)
    else:
        total.addmm_(gradient.T, hidden.to(total.dtype))


def _has_kernel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the device multiplies the narrow floats into float32 by itself; CPUs in torch 2.13 do not."""
    return a.is_cuda and a.dtype == b.dtype and a.dtype.itemsize == 2


def _chunks(weight: torch.Tensor, elements: int = CAST_ELEMENTS) -> Iterator[slice]:
    step = max(1, elements // max(1, weight.shape[1]))
    return (slice(start, start + step) for start in range(0, len(weight), step))
