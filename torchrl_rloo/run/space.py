"""Check of the disk space that checkpoints need."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def check_space(directory: Path, parts: Iterable[Any]) -> None:
    """Raise an ``OSError`` if the disk has less free space than the models and optimizers of a checkpoint take."""
    needed = sum(map(_bytes_of, parts))
    if (free := shutil.disk_usage(directory).free) < needed:
        raise OSError(
            f"directory={directory} has {free / 1e6:.1f} MB of free disk space, but a checkpoint takes at least "
            f"{needed / 1e6:.1f} MB; free space, or set another output directory"
        )


def _bytes_of(part: Any) -> int:
    """Return the bytes of the tensors of a model or optimizer; 0 for other parts."""
    if isinstance(part, torch.nn.Module):
        tensors = (t for t in part.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor))
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())  # tied weights are stored once
    if isinstance(part, torch.optim.Adam):  # and AdamW; two moments, which exist only after the first step
        return 2 * sum(p.nbytes for group in part.param_groups for p in group["params"] if p.requires_grad)
    return 0
