"""Optimizers made of other optimizers: Muon with AdamW, and states that stay in CPU memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from torchrl_rloo.training.stepping import call_closure, load_as_saved, with_gradient

CHUNK_BYTES = 2**28  # parameters whose states are on the device at the same time


class JointOptimizer(torch.optim.Optimizer):
    """Optimizer whose groups and states are those of its parts, each of which steps its own groups.

    Args:
        parts: optimizers of different parameters, before their first step.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient."""
        loss = call_closure(closure)
        for part in self.parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further groups, which no part would step.

        Raises:
            NotImplementedError: after the optimizer was made.
        """
        if hasattr(self, "parts"):
            raise NotImplementedError("a joint optimizer has fixed groups; make another one with all parameters")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self, "parts"):
            self._share()

    def _share(self) -> None:
        """Let the parts use the groups and states of this optimizer, which loading replaces."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.__setstate__({"state": self.state, "param_groups": [next(groups) for _ in part.param_groups]})


class ShardedMuon(torch.optim.Muon):
    """Muon on sharded matrices: each rank gathers one update at a time and orthogonalizes it whole.

    All ranks run the same iteration, so the step is that of a whole matrix, and moments stay sharded. torch's own step
    would run the iteration on shards, whose partial sums in bfloat16 change the result.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all matrices that have a gradient."""
        loss = call_closure(closure)
        for p, group in with_gradient(self):
            self._update(p, group)
        return loss

    def _update(self, p: torch.nn.Parameter, group: dict[str, Any]) -> None:
        # Sum the momentum on shards
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
        update = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        # Take the step of a whole matrix of zeros, on the device of the ranks
        mesh = p.device_mesh
        change = torch.zeros(p.shape, dtype=p.dtype, device=mesh.device_type).requires_grad_()
        change.grad = update.to(mesh.device_type).full_tensor()
        names = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
        settings = {name: group[name] for name in names}
        torch.optim.Muon([change], **settings, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        # Add this rank's shard of it
        shard = distribute_tensor(change.detach(), mesh, p.placements, src_data_rank=None)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(shard.to(p.device))


def make_muon(
    matrices: Sequence[Sequence[torch.nn.Parameter]],
    others: Sequence[Sequence[torch.nn.Parameter]],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    ns_steps: int = 5,
    adjust_lr_fn: str = "match_rms_adamw",
) -> JointOptimizer:
    """Build Muon for hidden matrices and AdamW for all other parameters.

    Args:
        matrices: groups of parameters with two dimensions.
        others: groups of further parameters; may be empty.
        lr: learning rate of both. The default ``adjust_lr_fn`` gives both updates the same size.
        betas: decay rates of AdamW.
        eps: term added to the denominator of AdamW.
        weight_decay: decoupled weight decay of both.
        momentum: decay rate of Muon's gradient.
        nesterov: whether Muon uses Nesterov momentum.
        ns_coefficients: coefficients of the Newton-Schulz iteration.
        ns_steps: its number of iterations.
        adjust_lr_fn: scale of Muon's learning rate: ``"match_rms_adamw"`` (Liu et al. 2025, arXiv 2502.16982) or
            ``"original"``.

    Returns:
        One optimizer with the groups of both.
    """
    muon = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": tuple(ns_coefficients)}
    muon |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn, "lr": lr, "weight_decay": weight_decay}
    adamw = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
    parts: list[torch.optim.Optimizer] = [
        (ShardedMuon if isinstance(group[0], DTensor) else torch.optim.Muon)(group, **muon) for group in matrices
    ]
    return JointOptimizer([*parts, *(torch.optim.AdamW(group, **adamw) for group in others)])


class OffloadedStates(JointOptimizer):
    """Optimizer whose states stay in CPU memory between steps.

    A step moves the states of some parameters to their device, updates these, and moves the states back. The result is
    bit for bit that of the optimizer without offload.

    Args:
        optimizer: optimizer before its first step. The update of a parameter must not depend on other parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__([optimizer])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient, some at a time."""
        loss = call_closure(closure)
        gradients = {p: p.grad for p, _ in with_gradient(self)}
        for p in gradients:
            p.grad = None
        for chunk in _chunks(list(gradients)):
            for p in chunk:
                p.grad = gradients[p]
                self._move(p, p.device)
            self.parts[0].step()
            for p in chunk:
                p.grad = None
                self._move(p, torch.device("cpu"))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the states may be read on the CPU from now on
        for p, gradient in gradients.items():
            p.grad = gradient
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and states; the states never reach the device as a whole."""
        load_as_saved(self, state_dict, "cpu")

    def _move(self, p: torch.nn.Parameter, device: torch.device) -> None:
        """Move the states of a parameter; their scalars, such as the step, stay where the optimizer made them."""
        state = self.state.get(p, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.device != device:
                state[name] = _to_cpu(value) if device.type == "cpu" else value.to(device, non_blocking=True)


def _to_cpu(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of a GPU to pinned memory, without a wait; the local shard of a sharded one."""
    if isinstance(value, DTensor):
        return value.to("cpu")
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return host.copy_(value, non_blocking=True)


def _chunks(parameters: list[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Yield parameters in lists of up to ``CHUNK_BYTES``, at least one each."""
    chunk, size = [], 0
    for p in parameters:
        local = p.to_local() if isinstance(p, DTensor) else p
        if chunk and size + local.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(p)
        size += local.nbytes
    if chunk:
        yield chunk
