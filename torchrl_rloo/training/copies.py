"""Copies of weights on several ranks, which must stay equal."""

from __future__ import annotations

from torch import nn

from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.weight_update.protocol import device_sum
from torchrl_rloo.weight_update.shards import reshard


def check_copies(model: nn.Module, ranks: Ranks) -> dict[int, str]:
    """Check that ranks with the same weights have them bit for bit: all with DDP, the copies of a shard with HSDP.

    A device that computes wrongly, or a collective that differs by rank, would let copies drift apart unnoticed.

    Args:
        model: model on all ranks, which call this function together.
        ranks: ranks that train it.

    Returns:
        Checksum of the weights that each rank has.

    Raises:
        RuntimeError: if copies differ, on all ranks.

    Example:
        >>> checksums = check_copies(nn.Linear(2, 2), Ranks.single())
        >>> list(checksums)
        [0]
    """
    reshard(model)
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    told = ranks.all_gather((_shard(model), device_sum(weights)), "checksums of the weights")
    for shard in {shard for shard, _ in told}:
        found = {rank: checksum for rank, (of, checksum) in enumerate(told) if of == shard}
        if len(set(found.values())) > 1:
            raise RuntimeError(
                f"ranks {list(found)} must have equal weights, but their checksums are {list(found.values())}; check "
                "their devices and software versions, and resume from an earlier checkpoint"
            )
    return {rank: checksum for rank, (_, checksum) in enumerate(told)}


def _shard(model: nn.Module) -> int:
    """Return a number that is equal on ranks with the same shards of all weights."""
    from torch.distributed.tensor import Replicate

    places = []
    for parameter in model.parameters():
        if hasattr(parameter, "to_local"):
            at = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
            places.append(tuple(place for place, kind in at if not isinstance(kind, Replicate)))
    return hash(tuple(places))  # of numbers, so equal in all processes
