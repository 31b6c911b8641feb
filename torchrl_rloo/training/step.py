"""One optimizer step: accumulate gradients over micro-batches and ranks, measure and clip them, step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import distributed
from torch.distributed.tensor import DTensor, Replicate
from torchrl.data import ReplayBuffer
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.data.metadata import shares_of
from torchrl_rloo.data.notices import notify_once
from torchrl_rloo.data.rows import merge_identical as merge
from torchrl_rloo.data.rows import micro_batches, unbind_rows
from torchrl_rloo.data.segments import split_segments
from torchrl_rloo.engines.root import set_gradient_sync
from torchrl_rloo.replay.filters import drop_zero_advantage
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training.parallel_tensor import average_copies

REDUCE = ("last_pass", "every_pass")
_EPSILON = 1e-6  # added to the norm, as torch.nn.utils.clip_grad_norm_ does


def minibatches(buffer: ReplayBuffer, number: int, epochs: int = 1) -> Iterator[TensorDictBase]:
    """Yield all rows of a buffer once per epoch, as ``number`` batches of nearly equal size.

    A buffer with fewer rows than planned is also split evenly, so each row weighs the same in its update.

    Args:
        buffer: buffer that samples without replacement.
        number: batches per epoch; fewer if the buffer has fewer rows.
        epochs: passes over the rows.

    Yields:
        Rows, batch size ``[b]``.

    Raises:
        ValueError: if ``number`` or ``epochs`` is below 1.
    """
    for name, value in (("number", number), ("epochs", epochs)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    for _ in range(epochs):
        left = len(buffer)
        for k in range(number, 0, -1):
            if size := -(-left // k):
                yield buffer.sample(size)
                left -= size


def accumulate(
    loss_fn: LossModule,
    batch: TensorDictBase,
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    merge_identical: bool = False,
    ranks: Ranks | None = None,
    rows_of: Callable[[TensorDictBase], TensorDictBase] | None = None,
    reduce: Literal["last_pass", "every_pass"] = "last_pass",
    backward: bool = True,
) -> list[Any]:
    """Accumulate the gradient of one optimizer step's batch, one micro-batch at a time.

    Normalizers are counted over the whole batch first, so the gradient does not depend on the split. Rows whose
    advantages are all 0 are dropped unless another term of the loss needs them.

    With ``ranks``, every rank passes the same batch of the whole step and trains on its share of the tokens. All ranks
    make equally many passes; a rank with fewer rows runs two tokens with a loss of 0. DDP and FSDP average the
    gradients over ranks, which gives the gradient of one process.

    With ``rows_of``, the batch has only metadata, equal on all ranks, and each rank has its own rows of it. Normalizers
    are counted over all ranks.

    Args:
        loss_fn: loss from :mod:`torchrl_rloo.objectives`, whose output has ``.loss``.
        batch: rows or preference pairs, batch size ``[B]``.
        micro_batch_size: rows per forward and backward pass. None takes all.
        max_tokens: tokens per pass; cannot be used with preference pairs. None sets no limit.
        merge_identical: True runs rows with equal tokens once, with their multiplicity.
        ranks: ranks that share the step, after :func:`~torchrl_rloo.training.shard_model`. None trains alone.
        rows_of: function from the batch to this rank's rows of it, such as
            :meth:`~torchrl_rloo.data.metadata.OwnRows.rows_of`. Every row belongs to one rank. None takes the batch as
            rows.
        reduce: ``"last_pass"`` reduces gradients over ranks once. ``"every_pass"`` reduces them in each pass, so that
            FSDP never holds the gradient of the whole model.
        backward: False only computes the outputs, to evaluate the loss on held-out rows.

    Returns:
        Detached output of the loss for each micro-batch of all ranks, to be merged into metrics by
        :func:`~torchrl_rloo.objectives.merge_outputs`.

    Raises:
        ValueError: if a limit is below 1, ``reduce`` is unknown, or ``max_tokens`` is given for preference pairs. Also
            if the loss has no parameter to train.
        RuntimeError: if the ranks passed different batches, or a row belongs to no rank or to several.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> from torchrl_rloo.data import encode_demonstrations
        >>> from torchrl_rloo.modules import TransformersWrapper
        >>> from torchrl_rloo.objectives import SFTLoss
        >>> tokenizer = build_tokenizer()
        >>> talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
        >>> rows = encode_demonstrations([talk] * 3, tokenizer)
        >>> policy = TransformersWrapper(build_model(tokenizer, seed=0), tokenizer=tokenizer, generate=False)
        >>> len(accumulate(SFTLoss(policy), rows, micro_batch_size=2))
        2
    """
    # Count the normalizers before rows are dropped or merged
    are_rows = rows_of is not None or keys.TOKENS in batch.keys(include_nested=True)  # False for preference pairs
    if rows_of is not None:
        batch = _own_rows(batch, rows_of, ranks)
    if are_rows and len(batch):
        batch = split_segments(batch)  # a trajectory whose past the template rewrote becomes several samples
    normalizers = loss_fn.normalizers(batch) if rows_of is None else _normalizers_of_ranks(loss_fn, batch, ranks)

    # Drop and merge rows that would repeat or waste a forward pass
    advantage = getattr(loss_fn.tensor_keys, "advantage", keys.ADVANTAGE)
    if advantage in batch.keys(include_nested=True) and not getattr(loss_fn, "needs_zero_advantage", True):
        batch = drop_zero_advantage(batch, advantage)
    if merge_identical:
        batch = merge(batch)
    # Take this rank's share, and split it into micro-batches
    packing = getattr(getattr(loss_fn, "actor_network", None), "packing", "none")
    if rows_of is None and ranks is not None and ranks.data_size > 1 and len(batch):
        share = shares_of(batch, ranks.data_size, packing)[ranks.data_rank]
        batch = batch[share] if share else _no_rows(batch)
    if are_rows:
        parts = micro_batches(batch, micro_batch_size, max_tokens=max_tokens, packing=packing)
    elif max_tokens is not None:
        raise ValueError(f"max_tokens={max_tokens} cannot be used with preference pairs; set micro_batch_size")
    elif micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1; None takes all pairs")
    else:
        parts = batch.split(micro_batch_size or max(1, len(batch)))
    with nullcontext() if backward else torch.no_grad():
        return _backward(loss_fn, list(parts) or [batch], normalizers, ranks, reduce)


def _own_rows(
    metadata: TensorDictBase, rows_of: Callable[[TensorDictBase], TensorDictBase], ranks: Ranks | None
) -> TensorDictBase:
    """Return this rank's rows of a batch, after a check that the ranks have all rows of one batch, each once."""
    own, ranks = rows_of(metadata), Ranks.single() if ranks is None else ranks
    ids = [int(row[keys.TRAJECTORY_ID]) for row in unbind_rows(metadata)]
    told = ranks.all_gather((len(own), len(ids), hash(tuple(ids))), "rows of the batch")
    owned = [number for number, *_ in told[:: ranks.share_size]]
    if len({batch[1:] for batch in told}) > 1 or sum(owned) != len(ids):
        raise RuntimeError(
            f"the ranks own {owned} rows of batches of {[total for _, total, _ in told]}; pass the same metadata on "
            "all ranks, and give each row to one rank"
        )
    return own


def _normalizers_of_ranks(loss_fn: LossModule, own: TensorDictBase, ranks: Ranks | None) -> Any:
    """Return the normalizers of all ranks' rows together."""
    if ranks is None or ranks.size == 1:
        return loss_fn.normalizers(own)
    # Of ranks with the same share only the first counts; the loss averages the counts over all ranks
    counted = own if ranks.rank % ranks.share_size == 0 else _no_rows(own)
    with ranks.call("normalizers"):
        mean = loss_fn.normalizers(counted, ranks.control)
    return replace(mean, num_rows=mean.num_rows * ranks.size, num_tokens=mean.num_tokens * ranks.size)


def _backward(
    loss_fn: LossModule, parts: list[TensorDictBase], normalizers: Any, ranks: Ranks | None, reduce: str
) -> list[Any]:
    """Add up the gradients of the parts, with as many passes on each rank; return the outputs of all ranks."""
    if reduce not in REDUCE:
        raise ValueError(f"reduce={reduce!r} must be one of {REDUCE}")
    passes, size = len(parts), 1 if ranks is None else ranks.size
    if size > 1:
        # Ranks with other batches would train on some rows twice and on others never
        told = ranks.all_gather((passes, normalizers.num_rows, normalizers.num_tokens), "batch")
        if any(t[1:] != told[0][1:] for t in told):
            raise RuntimeError(f"the ranks must pass the same batch, but have (rows, tokens) {[t[1:] for t in told]}")
        passes = max(t[0] for t in told)
    outputs = []
    for number in range(passes):
        if ranks is not None:
            set_gradient_sync(loss_fn, reduce == "every_pass" or number == passes - 1)
        part = parts[number] if number < len(parts) else _no_rows(parts[0])
        with nullcontext() if ranks is None else ranks.call(f"gradient, pass {number + 1} of {passes}"):
            output = loss_fn(part, normalizers)
            if not torch.is_grad_enabled():
                outputs.append(output)
                continue
            if not output.loss.requires_grad:
                raise ValueError("no parameter of the loss requires a gradient; build it on the model that is trained")
            # DDP and FSDP average over ranks, but the gradient is a sum over rows
            (output.loss * (1 if ranks is None else ranks.averaged)).backward()
        outputs.append(output.detach())
    if ranks is not None and ranks.tensor_parallel > 1 and torch.is_grad_enabled():
        average_copies(loss_fn.parameters())
    if size == 1:
        return outputs
    # Ranks with the same share have the same outputs
    shares = ranks.all_gather([o.cpu() for o in outputs], "metrics of the loss")[:: ranks.share_size]
    return [output for share in shares for output in share]


def _no_rows(batch: TensorDictBase) -> TensorDictBase:
    return batch[:0] if len(batch) else batch


class NonFiniteGradientError(RuntimeError):
    """Error of a gradient whose norm is NaN or infinite.

    Attributes:
        metrics: ``grad_norm``, for the rules of a run's health.
    """

    def __init__(self, norm: float) -> None:
        super().__init__(f"the gradient norm is non-finite ({norm}), so nothing was stepped; check the loss")
        self.metrics = {"grad_norm": norm}


def optimizer_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    max_grad_norm: float | None = None,
) -> torch.Tensor:
    """Clip the gradient, step optimizer and schedule, and clear the gradient.

    Parameters may be whole or sharded, on one mesh or several. All ranks get the norm of the whole gradient, and all
    raise if it is not finite.

    Args:
        model: module with the trained parameters.
        optimizer: optimizer of these parameters.
        scheduler: schedule of the optimizer. None keeps the learning rate constant.
        max_grad_norm: largest norm of the gradient. None disables clipping.

    Returns:
        Norm of the gradient before clipping, a scalar.

    Raises:
        TypeError: if ``scheduler`` is not a schedule.
        ValueError: if ``max_grad_norm`` is not above 0, the model trains no parameter, none of these has a gradient, or
            the optimizer holds none of them.
        NonFiniteGradientError: if the norm is not finite. Nothing is stepped.
    """
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler={scheduler!r} must be a learning-rate schedule; pass max_grad_norm by name")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm} must be above 0; use None to disable clipping")
    # Measure and clip; the factor is that of torch's clip_grad_norm_
    parameters = [p for p in model.parameters() if p.requires_grad]
    _check_trains(parameters, optimizer)
    norm = gradient_norm(parameters)
    if not norm.isfinite():
        raise NonFiniteGradientError(norm.item())
    if max_grad_norm is not None:
        factor = (max_grad_norm / (norm + _EPSILON)).clamp(max=1.0)
        for gradient in (_local(p.grad) for p in parameters if p.grad is not None):
            gradient.mul_(factor.to(gradient.device))
    # Step
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad()
    return norm


def _check_trains(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Raise if a step can change no parameter of the model; say once if it leaves some out, or if lr=0."""
    if not parameters:
        raise ValueError("no parameter of the model requires a gradient; unfreeze the model, or add an adapter")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [p for p in parameters if id(p) not in held]
    if len(left_out) == len(parameters):
        raise ValueError(
            f"the optimizer holds none of the model's {len(parameters)} trained parameters; make it from the trained "
            "model, after LoRA, sharding and loading"
        )
    if all(p.grad is None for p in parameters):
        raise ValueError(
            "no trained parameter of the model has a gradient; before the step, run backward on a loss of this model"
        )
    if number := sum(p.grad is not None for p in left_out):
        notify_once(
            f"{number} of the model's {len(parameters)} trained parameters have a gradient, but are not in the "
            "optimizer, so they never change and their gradients add up; add them to it, or freeze them"
        )
    rates = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
    if all(isinstance(rate, int | float) and rate == 0 for rate in rates):
        notify_once("the optimizer has lr=0, so its steps change nothing; set a learning rate above 0")


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return the Euclidean norm of the gradients of parameters, equal on all ranks that hold shards of them.

    Squares are added in float64. Shards add up over the ranks of their mesh, and copies count once. Gradients that are
    partial sums of a mesh are summed in place first. The norm is a scalar in float32, or float64 if a gradient is.
    """
    # Group the gradients by the groups of ranks that share them, in the order of the parameters
    shared: dict[tuple, list[torch.Tensor]] = {}
    for p in parameters:
        norms = shared.setdefault(_sharing(p), [])
        if p.grad is None:
            continue
        if isinstance(p.grad, DTensor) and any(place.is_partial() for place in p.grad.placements):
            whole = [Replicate() if place.is_partial() else place for place in p.grad.placements]
            p.grad = p.grad.redistribute(placements=whole)
        local = _local(p.grad)
        norms.append(torch.linalg.vector_norm(local, dtype=torch.promote_types(local.dtype, torch.float32)))
    # Add the squares of each group over its ranks
    found = [norm for norms in shared.values() for norm in norms] or [torch.zeros(())]
    device, dtype = found[0].device, max((norm.dtype for norm in found), key=lambda kind: kind.itemsize)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (mesh, dimensions), norms in shared.items():
        squares = sum((norm.to(device, torch.float64).square() for norm in norms), torch.zeros_like(total))
        if mesh is not None:
            squares = _sum_over_mesh(squares, mesh, dimensions)
        total += squares.to(device)
    return total.sqrt().to(dtype)


def _sharing(parameter: torch.nn.Parameter) -> tuple:
    """Return the mesh of a parameter and its dimensions that shard the parameter, or ``(None, ())`` if it is whole."""
    if not isinstance(parameter, DTensor):
        return None, ()
    return parameter.device_mesh, tuple(i for i, p in enumerate(parameter.placements) if not p.is_replicate())


def _sum_over_mesh(
    value: torch.Tensor, mesh: torch.distributed.DeviceMesh, dimensions: tuple[int, ...]
) -> torch.Tensor:
    """Return the sum of a value over dimensions of a mesh, on its device: offloaded shards are on the CPU."""
    value = value.to(mesh.device_type)
    for dimension in dimensions:
        distributed.all_reduce(value, group=mesh.get_group(dimension))
    return value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
