"""Distribution of a model over ranks by torch's own DDP and FSDP2, checks of its copies, activations in CPU memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchrl_rloo.engines.root import adopt, call_root, is_distributed
from torchrl_rloo.modules.context_parallel import split_tokens
from torchrl_rloo.runtime.lookup import parse_dtype
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training.parallel_tensor import split_layers
from torchrl_rloo.weight_update.four_bit import check_shardable
from torchrl_rloo.weight_update.protocol import device_sum
from torchrl_rloo.weight_update.shards import reshard

PARALLEL = ("none", "ddp", "fsdp")
MIN_OFFLOAD_BYTES = 2**16  # smaller activations stay: a transfer costs more than their memory


def shard_model(
    model: nn.Module,
    ranks: Ranks,
    parallel: Literal["none", "ddp", "fsdp"] = "fsdp",
    *,
    precision: Literal["float32", "bfloat16"] = "float32",
    float32_head: bool = False,
    shard_size: int | None = None,
    offload_parameters: bool = False,
) -> nn.Module:
    """Distribute a model over ranks in place, so that all of them train it together.

    ``"ddp"`` keeps the whole model on each rank and averages gradients (``DistributedDataParallel``). ``"fsdp"`` keeps
    a shard on each rank and gathers one layer at a time (``fully_shard``). Both give the gradient of one process, see
    :func:`~torchrl_rloo.training.accumulate`. Create wrappers, losses and the optimizer afterwards.

    Args:
        model: causal language model, LoRA model, :class:`~torchrl_rloo.modules.ValueHead` or
            :class:`~torchrl_rloo.modules.RewardModel`, equal on all ranks.
        ranks: ranks of this process.
        parallel: ``"none"``, ``"ddp"`` or ``"fsdp"``.
        precision: with FSDP, dtype of gathered parameters and activations. Shards, gradient sums and optimizer states
            keep the dtype of the model, which should be float32. DDP ignores it: set the precision of the wrapper.
        float32_head: with FSDP, gather the parameters outside of layers (embedding, last norm, head) in float32.
        shard_size: with FSDP, ranks that share one copy of the model; the other ranks hold further copies (HSDP). None
            shares one copy among all.
        offload_parameters: with FSDP on CUDA, keep shards, gradients and optimizer states on the CPU.

    Returns:
        The same model.

    Raises:
        ValueError: if an argument is unknown, has no effect, or does not fit the number of ranks. Also if torch cannot
            shard weights in 4 bits.
        RuntimeError: if the model is distributed already.

    Example::

        ranks = Ranks.from_environment("cuda")
        model = shard_model(load_model(name, device=str(ranks.device))[0], ranks, precision="bfloat16")
        policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing="packed")
    """
    _check(ranks, parallel, precision, float32_head, shard_size, offload_parameters)
    if is_distributed(model):
        raise RuntimeError(f"{type(model).__name__} is distributed already; call shard_model once")
    if parallel != "none":
        check_shardable(model, parallel, ranks.tensor_parallel)
    # Split matrices and tokens
    splits = ranks.tensor_parallel > 1
    if splits or parallel == "fsdp":
        # DDP of split matrices is FSDP with a copy per rank
        meshes = _make_meshes(ranks, shard_size if parallel == "fsdp" else 1)
    if splits:
        split_layers(model, meshes.tensor)
    if ranks.context_parallel > 1:
        split_tokens(model, ranks)
    # Average gradients; a frozen model has none
    if parallel == "ddp" and not splits:
        if not any(p.requires_grad for p in model.parameters()):
            return model
        device_ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        # Buffers are equal on all ranks, because no layer changes them
        known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch < 2.13
        settings = {"device_ids": device_ids, "process_group": ranks.group, sync: False}
        adopt(nn.parallel.DistributedDataParallel(model, **settings))
        _arrange_buckets(model)
    elif parallel != "none":
        _fully_shard(model, ranks, meshes, precision, float32_head, offload_parameters)
    return model


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
    told = ranks.all_gather((_place_of(model), device_sum(weights)), "checksums of the weights")
    for shard in {shard for shard, _ in told}:
        found = {rank: checksum for rank, (of, checksum) in enumerate(told) if of == shard}
        if len(set(found.values())) > 1:
            raise RuntimeError(
                f"ranks {list(found)} must have equal weights, but their checksums are {list(found.values())}; check "
                "their devices and software versions, and resume from an earlier checkpoint"
            )
    return {rank: checksum for rank, (_, checksum) in enumerate(told)}


def _place_of(model: nn.Module) -> int:
    """Return a number that is equal on ranks with the same shards of all weights."""
    from torch.distributed.tensor import Replicate

    places = []
    for parameter in model.parameters():
        if hasattr(parameter, "to_local"):
            at = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
            places.append(tuple(place for place, kind in at if not isinstance(kind, Replicate)))
    return hash(tuple(places))  # of numbers, so equal in all processes


@contextmanager
def offload_activations(enabled: bool = True) -> Iterator[None]:
    """Keep tensors that autograd saves in CPU memory, from the forward to the backward pass.

    Gradients are bit for bit those without offload. Parameters stay where they are. With gradient checkpointing, only
    the inputs of layers are saved, and so moved. Transfers use pinned memory and run in order with the computation.

    Args:
        enabled: False leaves everything on the device.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(300, 300))
        >>> with offload_activations():
        ...     loss = (torch.ones(300, 300) @ weight).square().mean()
        >>> loss.backward()
    """
    if not enabled:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
    """Return the device of a tensor and its copy in CPU memory, or the tensor itself if that would save nothing."""
    owner = tensor if tensor._base is None else tensor._base  # the transposed weight of a linear layer is a view
    if isinstance(owner, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return tensor
    if tensor.nbytes < MIN_OFFLOAD_BYTES or tensor.nbytes > tensor.untyped_storage().nbytes():  # small, or expanded
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _unpack(packed: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=True)


def _arrange_buckets(model: nn.Module) -> None:
    """Reduce gradients of zeros once, so that DDP arranges its buckets before the first step and never again.

    DDP does so after the first reduction of a process. A sum over three or more ranks rounds by its place in a bucket.
    So the first step after a resume would not have the bits of the same step without a stop.
    """
    with torch.enable_grad():
        call_root(model, lambda: sum(p.reshape(-1)[:0].sum() for p in model.parameters() if p.requires_grad)).backward()
        model.zero_grad()
        call_root(model, lambda: None)  # the next pass arranges them


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that are sharded and offloaded one by one: those that Transformers never splits.

    Raises:
        ValueError: if there are none.
    """
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers to shard (_no_split_modules={sorted(names)}); use parallel='ddp'"
        )
    return layers


def _fully_shard(
    model: nn.Module,
    ranks: Ranks,
    meshes: _Meshes,
    precision: str,
    float32_head: bool,
    offload_parameters: bool,
) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Compute in the precision, sum gradients in float32
    narrow = None if precision == "float32" else parse_dtype(precision)
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32 if narrow else None)
    root_policy = MixedPrecisionPolicy() if float32_head else policy
    offload = CPUOffloadPolicy() if offload_parameters else OffloadPolicy()
    for layer in layers_of(model):
        fully_shard(layer, mesh=meshes.layers, mp_policy=policy, offload_policy=offload)
    # The root's own parameters are used at both ends of a pass, so they stay gathered in between
    fully_shard(model, mesh=meshes.root, mp_policy=root_policy, offload_policy=offload, reshard_after_forward=False)


class _Meshes(NamedTuple):
    """Device meshes of FSDP and of tensor parallelism.

    Attributes:
        layers: mesh that shards layers, also with a first dimension that replicates.
        root: mesh that shards the parameters outside of layers. Ranks of tensor parallelism share them as well.
        tensor: mesh that splits the matrices of layers; None without tensor parallelism.
    """

    layers: DeviceMesh
    root: DeviceMesh
    tensor: DeviceMesh | None


def _make_meshes(ranks: Ranks, shard_size: int | None) -> _Meshes:
    """Arrange the ranks: those of one tensor-parallel group are neighbors, then those that share one copy."""
    tensor = ranks.tensor_parallel
    shard_size = shard_size or ranks.averaged
    copies = ranks.averaged // shard_size
    # One dimension shards; with several copies, another one replicates
    shape = {"replicate": copies, "shard": shard_size, "tensor": tensor}
    mesh = ranks.make_mesh(**{n: s for n, s in shape.items() if n == "shard" or s > 1})
    layers = mesh if tensor == 1 else mesh["replicate", "shard"] if copies > 1 else mesh["shard"]
    if tensor == 1:
        return _Meshes(layers, layers, None)
    root = ranks.make_mesh(all=ranks.size) if copies == 1 else layers
    return _Meshes(layers, root, mesh["tensor"])


def _check(
    ranks: Ranks,
    parallel: str,
    precision: str,
    float32_head: bool,
    shard_size: int | None,
    offload_parameters: bool,
) -> None:
    if parallel not in PARALLEL:
        raise ValueError(f"parallel={parallel!r} must be one of {PARALLEL}")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision={precision!r} must be 'float32' or 'bfloat16'")
    if parallel == "none":
        if ranks.averaged > 1:
            raise ValueError(f"parallel='none' cannot be combined with {ranks.size} ranks; set it to 'ddp' or 'fsdp'")
    elif ranks.group is None:
        raise ValueError(f"parallel={parallel!r} requires ranks of a process group; use Ranks.from_environment")
    # Settings of FSDP
    settings = {"float32_head": float32_head, "shard_size": shard_size, "offload_parameters": offload_parameters}
    for name, value in settings.items():
        if value and parallel != "fsdp":
            raise ValueError(f"{name}={value} requires parallel='fsdp', got {parallel!r}; remove it")
    if float32_head and precision == "float32":
        raise ValueError("float32_head=True has no effect with precision='float32'; remove it")
    if shard_size is not None and (shard_size < 1 or ranks.averaged % shard_size):
        divided = "" if ranks.tensor_parallel == 1 else f" / tensor_parallel={ranks.tensor_parallel}"
        raise ValueError(f"shard_size={shard_size} must divide the number of ranks, {ranks.size}{divided}")
    if offload_parameters and ranks.device.type == "cpu":
        raise ValueError("offload_parameters=True requires a CUDA device; on the CPU there is nothing to offload")
