"""Sharded tensors in a checkpoint: a folder of safetensors by ``torch.distributed.checkpoint``, and their layout.

A folder has one file of tensors per rank, and ``state.pt`` with everything else: plain values, whole tensors, a place
for each sharded tensor, and the size and SHA-256 of the other files. Nothing in it can run code. The number of ranks
that read a folder may differ from the number that wrote it: each part gets its state in the layout that it has now.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from torchrl_rloo.run.state import one_line, read_state, rebuild
from torchrl_rloo.runtime.files import SAFE_FLAGS, atomic_write, explained, sync_directory
from torchrl_rloo.runtime.ranks import Ranks

STATE = "state.pt"
_PLACE = "__sharded_tensor__"  # key of the dict that stands for a sharded tensor
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class SavedTensor:
    """Tensor in the files of a folder, not yet read; the shape is that of the whole tensor."""

    folder: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype


def is_sharded(value: Any) -> bool:
    """Return whether a value is a tensor that is sharded over ranks."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def detach_shards(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a state with a place for each sharded tensor, and these tensors by name; tied ones share a name."""
    shards: dict[str, torch.Tensor] = {}
    names: dict[tuple, str] = {}

    def detach(value: Any, path: tuple) -> Any:
        if not is_sharded(value):
            return None
        if any(placement.is_partial() for placement in value.placements):
            raise ValueError(
                f"{'/'.join(map(str, path))} is a sum that is pending over ranks; call full_tensor() on it"
            )
        local = value.to_local()
        key = (local.untyped_storage()._cdata, local.storage_offset(), value.shape)  # equal for tied weights
        name = names.setdefault(key, "/".join(map(str, path)))
        if shards.setdefault(name, value).shape != value.shape:
            raise ValueError(f"two tensors of the state have the name {name!r}; rename the part or key of one of them")
        return {_PLACE: name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}

    return rebuild(dict(state), detach), shards


def copy_to_cpu(state: Any) -> Any:
    """Copy a state to CPU memory; tensors that share memory, such as tied weights, also share it in the copy."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in storages:
            storages[key] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        whole = torch.empty(0, dtype=tensor.dtype)
        return whole.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())

    def replace(value: Any, path: tuple) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        value = value.detach()
        if is_sharded(value):  # only this rank's shards
            return value.clone() if value.device.type == "cpu" else value.to("cpu")
        return copied(value)

    return rebuild(state, replace)


def write_folder(folder: Path, state: Mapping[str, Any], shards: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Write a state and its shards into an empty folder that all ranks see, durably; a collective call.

    Only rank 0's state is written. If one rank cannot write its file, all raise.
    """
    from torch.distributed import checkpoint as dcp

    # One file per rank
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with ranks.call("checkpoint"), _first_failure(folder):
        dcp.save(dict(shards), storage_writer=writer, process_group=ranks.control, no_dist=ranks.size == 1)
    # Rank 0 records the size and checksum of each; a file that another rank wrote may be large, so its writer reads it
    own = sorted(folder.glob(f"shard-{ranks.rank + 1:05d}-*{_SUFFIX}"))
    sums = ranks.all_gather(agree(ranks, lambda: {path.name: [path.stat().st_size, _sha256(path)] for path in own}))

    def finish() -> None:
        files = {name: entry for entries in sums for name, entry in entries.items()}
        with atomic_write(folder / STATE) as file:
            torch.save({"state": state, "files": files}, file)
        sync_directory(folder)

    ranks.broadcast(finish)


def read_folder(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Read the state of a folder, with a :class:`SavedTensor` for each sharded tensor; a collective call.

    Each rank verifies the checksums of its share of the files. If one finds damage, all raise an error of any type.
    """

    def check() -> dict[str, Any]:
        content = read_state(_regular(folder / STATE))
        if sorted(content) != ["files", "state"] or type(content["state"]) is not dict:
            raise ValueError(f"{STATE} has the entries {sorted(content, key=str)} instead of files and state")
        names, present = sorted(content["files"]), sorted(path.name for path in folder.glob(f"*{_SUFFIX}"))
        if names != present:
            raise ValueError(f"it must have the files {names}, but has {present}")
        for name in names[ranks.rank :: ranks.size]:
            path = _regular(folder / name)
            if [path.stat().st_size, _sha256(path)] != list(content["files"][name]):
                raise ValueError(f"the size or checksum of {name} is wrong")
        return _with_places(content["state"], folder)

    return agree(ranks, check)


def read_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Fill tensors, by name, from the safetensors files of a folder; of a sharded one, a rank reads only its shards."""
    from torch.distributed import checkpoint as dcp

    with _first_failure(folder), torch.no_grad():
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)


def _with_places(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a state with a :class:`SavedTensor` in each place, after a check that the files have all of it."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata

    def fill(value: Any, path: tuple) -> SavedTensor | None:
        if type(value) is not dict or _PLACE not in value:
            return None
        tensor = SavedTensor(folder, value[_PLACE], torch.Size(value["shape"]), getattr(torch, value["dtype"]))
        found = saved[tensor.name]
        sizes = [piece.sizes for piece in found.chunks]
        if found.size != tensor.shape or found.properties.dtype != tensor.dtype:
            raise ValueError(f"tensor {tensor.name} has shape {list(found.size)} and {found.properties.dtype}")
        if sum(map(math.prod, sizes)) != math.prod(tensor.shape):
            raise ValueError(f"tensor {tensor.name} has pieces of sizes {sizes}, which are not all of it")
        return tensor

    return rebuild(state, fill)


def agree(ranks: Ranks, function: Callable[[], Any]) -> Any:
    """Call a function on all ranks and return its result, or raise on all ranks if it raises on one."""
    result, error = None, None
    try:
        result = function()
    except Exception as raised:  # reported on all ranks
        error = raised
    errors = ranks.all_gather(None if error is None else one_line(error))
    if error is not None:
        raise error
    if failed := [rank for rank, text in enumerate(errors) if text is not None]:
        raise RuntimeError(f"rank {failed[0]} failed: {errors[failed[0]]}")
    return result


def with_own_group(ranks: Ranks) -> Ranks:
    """Return ranks with a separate group, for the collective calls of a thread; all processes must call this."""
    if ranks.size == 1:
        return ranks
    members = torch.distributed.get_process_group_ranks(ranks.control)
    timeout = None if ranks.timeout is None else timedelta(seconds=ranks.timeout)
    control = torch.distributed.new_group(members, backend="gloo", timeout=timeout)
    return Ranks(ranks.rank, ranks.size, device=ranks.device, group=ranks.group, control=control)


@contextmanager
def _first_failure(folder: Path):
    """Replace the error of ``torch.distributed.checkpoint`` by that of the first rank that failed."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
            yield
    except CheckpointException as error:
        first = min(error.failures)
        with explained(folder):
            raise error.failures[first][0] from error


def _regular(path: Path) -> Path:
    """Return a path, or raise if it is a link or no regular file."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | SAFE_FLAGS), "rb", buffering=0) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def gather_state(**parts: Any) -> dict[str, Any]:
    """Return ``{name: part.state_dict()}`` of all parts, to save under one key of the checkpoint."""
    states = {name: part.state_dict() for name, part in parts.items()}
    for name, part in parts.items():
        _check_shards(name, part, states[name])
    return states


def restore_state(state: Mapping[str, Any], **parts: Any) -> None:
    """Restore the state that :func:`gather_state` saved for each part.

    A tensor comes back whole or in shards, as the part has it now, however it was saved. If the names in the state and
    of the parts differ, no part is restored.
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
