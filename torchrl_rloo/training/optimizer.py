"""Optimizer steps: the norm of the gradient over all shards, clipping, step, schedule."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Replicate

from torchrl_rloo.data.notices import notify_once

_EPSILON = 1e-6  # added to the norm, as torch.nn.utils.clip_grad_norm_ does


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
    partial sums of a mesh are summed in place first.

    Args:
        parameters: parameters, in the same order on all ranks. Those without a gradient count 0.

    Returns:
        Scalar in float32, or float64 if a gradient has this type.

    Example:
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> parameter.grad = torch.tensor([3.0, 4.0])
        >>> gradient_norm([parameter])
        tensor(5.)
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
