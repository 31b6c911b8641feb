"""State of the parts of a run: gathered for a checkpoint and restored from one, also into other shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchrl_rloo.run.shards import SavedTensor, is_sharded, read_tensors
from torchrl_rloo.run.state import rebuild


def gather_state(**parts: Any) -> dict[str, Any]:
    """Return ``{name: part.state_dict()}`` of all parts, to save under one key of the checkpoint.

    Raises:
        TypeError: if a part has no ``state_dict``.
        ValueError: if an optimizer has whole tensors for a sharded parameter, which differ between ranks.
    """
    for name, part in parts.items():
        if not hasattr(part, "state_dict"):
            raise TypeError(f"part {name!r} is a {type(part).__name__}, but must have state_dict()")
    states = {name: part.state_dict() for name, part in parts.items()}
    for name, part in parts.items():
        _check_shards(name, part, states[name])
    return states


def restore_state(state: Mapping[str, Any], **parts: Any) -> None:
    """Restore the state that :func:`gather_state` saved for each part.

    A tensor comes back whole or in shards, as the part has it now, however it was saved.

    Raises:
        KeyError: if the names in ``state`` and in ``parts`` differ. No part is restored then.
    """
    missing = sorted(set(parts) - set(state))
    unexpected = sorted(set(state) - set(parts))
    if missing or unexpected:
        raise KeyError(
            f"the saved state must have the names of the parts: {missing} missing from the state, {unexpected} in the "
            "state but not among the parts"
        )
    for name, part in parts.items():
        part.load_state_dict(_laid_out(state[name], part))


def _laid_out(state: Any, part: Any) -> Any:
    """Return a part's saved state with each tensor in the layout of the part."""
    models = _model_tensors(part)
    pending: dict[SavedTensor, torch.Tensor] = {}

    def lay_out(value: Any, path: tuple) -> Any:
        if not isinstance(value, (torch.Tensor, SavedTensor)):
            return None
        like = models.get(path[:1]) if isinstance(part, torch.nn.Module) else models.get(path[:2])
        if isinstance(value, SavedTensor):
            if value not in pending:
                pending[value] = _allocate(value, like)
            return pending[value]
        return _distribute(value, like)

    state = rebuild(state, lay_out)
    for folder in {saved.folder for saved in pending}:
        read_tensors({saved.name: tensor for saved, tensor in pending.items() if saved.folder == folder}, folder)
    return state


def _model_tensors(part: Any) -> dict[tuple, torch.Tensor]:
    """Return the tensors that give the layout of a part's state, by the beginning of their path in it."""
    if isinstance(part, torch.nn.Module):
        return {(name,): tensor for name, tensor in part.state_dict().items() if isinstance(tensor, torch.Tensor)}
    # State of an optimizer has the layout of its parameters, which it numbers over all groups
    groups = getattr(part, "param_groups", [])
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {("state", number): parameter for number, parameter in enumerate(parameters)}


def _allocate(saved: SavedTensor, like: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor to fill, of zeros rather than earlier contents of the memory."""
    placements = _placements(saved.shape, like)
    if placements is None:
        return torch.zeros(saved.shape, dtype=saved.dtype)
    if saved.shape == like.shape:
        return torch.zeros_like(like, dtype=saved.dtype, requires_grad=False)
    from torch.distributed.tensor import zeros

    return zeros(saved.shape, dtype=saved.dtype, device_mesh=like.device_mesh, placements=placements)


def _distribute(tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's shards of a tensor that was saved whole; scalars stay as they are."""
    placements = _placements(tensor.shape, like)
    if placements is None or not tensor.ndim:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, placements, src_data_rank=None)


def _placements(shape: torch.Size, like: torch.Tensor | None) -> list[Any] | None:
    """Return how a tensor is sharded in the layout of another one; None if that is whole.

    A state of another shape, such as a scale per block of a row, is sharded in the same dimensions if their lengths
    are equal. Otherwise each rank has it whole.
    """
    if not is_sharded(like):
        return None
    from torch.distributed.tensor import Replicate

    dims = [getattr(placement, "dim", None) for placement in like.placements]
    fits = len(shape) == like.ndim and all(dim is None or shape[dim] == like.shape[dim] for dim in dims)
    return list(like.placements) if fits else [Replicate()] * len(dims)


def _check_shards(name: str, part: Any, state: Any) -> None:
    """Raise a ``ValueError`` if an optimizer keeps local tensors for shards: only those of rank 0 would be saved."""
    if isinstance(part, torch.nn.Module):
        return
    for path, parameter in _model_tensors(part).items():
        found = state.get("state", {}).get(path[1], {}) if is_sharded(parameter) else {}
        local = [key for key, value in found.items() if isinstance(value, torch.Tensor) and value.numel() > 1]
        if wrong := [key for key in local if not is_sharded(found[key])]:
            raise ValueError(
                f"part {name!r} keeps {wrong} of a sharded parameter as local tensors, which a checkpoint "
                "cannot assemble; use an optimizer that keeps DTensors (optimizer.name)"
            )
