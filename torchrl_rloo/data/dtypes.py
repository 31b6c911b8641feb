"""Torch dtypes by name, as configurations give them."""

from __future__ import annotations

import torch


def parse_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name such as ``"bfloat16"``.

    Raises:
        ValueError: if torch has no dtype of that name.

    Example:
        >>> parse_dtype("bfloat16")
        torch.bfloat16
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r} is not a torch dtype; use 'float32' or 'bfloat16'")
    return dtype
