"""Products with a large output projection, accumulated and returned in at least float32.

Logits rounded to bfloat16 have a relative error of up to 2^-9, and the sampler and the trainer round different sums.
Both therefore use these functions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CAST_ELEMENTS = 2**18  # weights cast at once: 1 MiB in float32, which stays in the cache of a core


def accumulation_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the widest dtype of the tensors, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def widen_hidden(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast ``hidden`` to ``dtype``, unless the device has a kernel that widens its products with ``weight``."""
    return hidden if _has_kernel(hidden, weight) else hidden.to(dtype)


def project(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``hidden @ weight.T`` in at least float32, without gradient.

    Args:
        hidden: ``[n, H]``.
        weight: ``[V, H]``, also of a narrower dtype. At most :data:`CAST_ELEMENTS` of its entries are cast at once.
        out: ``[n, V]`` output, used if it has the dtype of the result. None allocates a tensor.

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


def narrow_gradient(gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Cast the gradient of a product to the dtype of both factors if the device has a kernel that widens products."""
    return gradient.to(weight.dtype) if _has_kernel(hidden, weight) else gradient


def add_hidden_gradient(total: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> None:
    """Add ``gradient @ weight``, the gradient of :func:`project` for ``hidden``, to ``total`` ``[n, H]``."""
    if _has_kernel(weight, weight):
        total += torch.mm(gradient.to(weight.dtype), weight, out_dtype=total.dtype)
    elif gradient.dtype == weight.dtype:
        total.addmm_(gradient, weight)
    else:
        for rows in _chunks(weight):
            total.addmm_(gradient[:, rows], weight[rows].to(gradient.dtype))


def add_weight_gradient(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add ``gradient.T @ hidden``, the gradient of :func:`project` for ``weight``, to ``total`` ``[V, H]``."""
    if hidden.dtype != total.dtype and _has_kernel(hidden, hidden):
        gradient = gradient.to(hidden.dtype)
        for rows in _chunks(total, 64 * CAST_ELEMENTS):  # bounds the product, which has the size of the weight
            total[rows] += torch.mm(gradient[:, rows].T, hidden, out_dtype=total.dtype)
    else:
        total.addmm_(gradient.T.to(total.dtype), hidden.to(total.dtype))


def _has_kernel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the device multiplies 16-bit floats into float32; CPUs in torch 2.13 do not."""
    return a.is_cuda and a.dtype == b.dtype and a.dtype.itemsize == 2


def _chunks(weight: torch.Tensor, elements: int = CAST_ELEMENTS) -> Iterator[slice]:
    step = max(1, elements // max(1, weight.shape[1]))
    return (slice(start, start + step) for start in range(0, len(weight), step))
