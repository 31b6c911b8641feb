"""Tensors sharded over ranks: the piece that each rank has, and gathers to a single rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

from torchrl_rloo.runtime.ranks import RankError, Ranks
from torchrl_rloo.weight_update.protocol import TensorInfo, pack, packed_size, unpack

SENDER = 0  # rank that has the engines


class Piece(NamedTuple):
    """Block of a tensor that one rank has."""

    rank: int  # of several ranks with the same block, the first
    offset: tuple[int, ...]  # index of its first element in each dimension
    shape: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of the whole tensor that the block fills."""
        for dim, (start, size) in enumerate(zip(self.offset, self.shape, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model's parameters are sharded over ranks."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def is_sender(rank: int | None = None) -> bool:
    """Return whether this process sends for all training processes; by default ``torch.distributed`` gives the rank."""
    if rank is None and distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
    return (rank or 0) == SENDER


def sharing_ranks(model: nn.Module) -> Ranks:
    """Return the ranks that share a model's weights: all training ranks, or this process if it has them all.

    It is a collective call if the model is sharded.
    """
    if not is_sharded(model):
        return Ranks.single()
    world = distributed.group.WORLD
    control = world if distributed.get_backend() == "gloo" else distributed.new_group(backend="gloo")
    return Ranks(distributed.get_rank(), distributed.get_world_size(), group=world, control=control)


def reshard(model: nn.Module) -> None:
    """Release parameters that a forward pass under ``fully_shard`` left gathered: training updates the shards."""
    if not distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(f"{name or 'the model'} is in FullyShardedDataParallel; shard it with fully_shard instead")
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Raise RankError at an error within the context if there are several ranks, since others may wait for this one."""
    try:
        yield
    except Exception as error:
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            raise
        rank, cause = distributed.get_rank(), f"{type(error).__name__}: {error}"
        raise RankError(f"rank {rank} failed while all ranks {what}: {cause}") from error


def list_pieces(tensor: Any) -> tuple[Piece, ...]:
    """Return the blocks of a tensor from :func:`simplify`; a single one of the sender if it is not sharded."""
    if not hasattr(tensor, "full_tensor"):
        return (Piece(SENDER, (0,) * tensor.dim(), tuple(tensor.shape)),)
    return _split(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def simplify(tensor: Any) -> torch.Tensor:
    """Return a tensor that is whole or sharded into plain blocks; a collective call for other placements."""
    from torch.distributed.tensor import Replicate, Shard

    if not hasattr(tensor, "full_tensor") or all(type(p) in (Replicate, Shard) for p in tensor.placements):
        return tensor
    return tensor.full_tensor()


def gather(tensors: Sequence[Any], to: int | None = SENDER) -> list[torch.Tensor]:
    """Return whole tensors on one rank; a collective call of all ranks if any tensor is sharded.

    Each other rank sends its blocks of all tensors in one message. It has no more memory than that, and gets an empty
    list. ``to=None`` returns the tensors on all ranks.
    """
    if not any(hasattr(tensor, "full_tensor") for tensor in tensors):
        return list(tensors)
    tensors = [simplify(tensor) for tensor in tensors]
    if to is None:
        whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    else:
        whole = _gather_blocks(tensors, to)
    _wait_for_devices(tensors)
    return whole


def _gather_blocks(tensors: Sequence[Any], to: int) -> list[torch.Tensor]:
    """Send the blocks of each rank to one rank, in the order of the ranks."""
    rank = distributed.get_rank()
    sharded = [tensor for tensor in tensors if hasattr(tensor, "full_tensor")]
    # With tensor parallelism, ranks outside of the receiver's mesh have further copies of some tensors
    shared = [number for number, tensor in enumerate(sharded) if to in tensor.device_mesh.mesh]
    blocks = [(number, piece) for number in shared for piece in list_pieces(sharded[number])]
    if rank == to:
        whole = [torch.empty(t.shape, dtype=t.dtype, device=t.to_local().device) for t in sharded]
    for owner in sorted({piece.rank for _, piece in blocks}):
        owned = [(number, piece) for number, piece in blocks if piece.rank == owner]
        if owner == rank == to:
            for number, piece in owned:
                piece.of(whole[number]).copy_(sharded[number].to_local())
        elif rank in (owner, to):
            # Move all blocks in one buffer, on the device that the ranks communicate with
            infos = [TensorInfo.of("", sharded[number])._replace(shape=piece.shape) for number, piece in owned]
            buffer = torch.empty(packed_size(infos), dtype=torch.uint8, device=_wire_device(sharded[0]))
            if rank == owner:
                pack([sharded[number].to_local() for number, _ in owned], buffer)
                distributed.send(buffer, to)
            else:
                distributed.recv(buffer, owner)
                for (number, piece), view in zip(owned, unpack(buffer, infos), strict=True):
                    piece.of(whole[number]).copy_(view)
            del buffer
    if rank != to:
        return []
    gathered = iter(whole)
    return [next(gathered) if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]


@lru_cache(maxsize=4096)
def _split(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[Piece, ...]:
    """Return the blocks of a tensor, one for each coordinate of the mesh dimensions that shard it."""
    pieces = []
    counts = [n if placement.is_shard() else 1 for n, placement in zip(mesh.shape, placements, strict=True)]
    for coordinate in product(*map(range, counts)):
        offset, size = [0] * len(shape), list(shape)
        for index, count, placement in zip(coordinate, counts, placements, strict=True):
            if placement.is_shard():  # as torch.chunk: all chunks but the last have the same size
                dim = placement.dim % len(shape)
                chunk = -(-size[dim] // count)
                start = min(index * chunk, size[dim])
                offset[dim] += start
                size[dim] = min(chunk, size[dim] - start)
        if all(size):
            pieces.append(Piece(int(mesh.mesh[coordinate]), tuple(offset), tuple(size)))
    return tuple(pieces)


def _wire_device(tensor: Any) -> torch.device:
    kind = tensor.device_mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def _wait_for_devices(tensors: Sequence[Any]) -> None:
    """Wait until transfers on a device have ended, because other threads read the tensors."""
    for device in {_wire_device(tensor) for tensor in tensors if hasattr(tensor, "full_tensor")}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
