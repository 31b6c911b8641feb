"""Optimizers that torch lacks: AdamW with moments of 8 bits, Muon on shards with AdamW, states in CPU memory.

bitsandbytes' 8-bit optimizer rejects parameters of FSDP2, and its blocks cross rows. On the CPU up to a tenth of its
codes are not the nearest. torchao's compiles a kernel for each shape, and its states are no plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

BLOCK_SIZES = (256, 128, 64)  # values that share a scale: the largest one that divides the length of a row
MIN_VALUES = 4096  # smaller parameters, such as biases and norms, keep float32 moments
CHUNK_VALUES = 2**23  # values per pass, which bounds the float32 copies of the moments
CHUNK_BYTES = 2**28  # parameters whose offloaded states are on the device at the same time
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with moments of 8 bits.

    A block of up to 256 values of a row shares a float32 scale (Dettmers et al. 2022, arXiv 2110.02861). Of the second
    moment the square root is stored, whose range is that of the gradient. Blocks stay within rows. So parameters
    sharded by rows have the moments of whole ones, also when another number of ranks loads a checkpoint.

    Parameters with fewer than 4096 values, vectors, and those whose rows are no multiple of 64 keep float32 moments.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}={value} must be at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} must be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient."""
        loss = _call_closure(closure)
        for p, group in _with_gradient(self):
            self._update(p, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and moments; torch would convert the codes to the type of the parameters."""
        _load_as_saved(self, state_dict)

    def _update(self, p: torch.nn.Parameter, group: dict[str, Any]) -> None:
        # Begin with moments of 0
        state = self.state[p]
        if not state:
            state["step"], block = torch.zeros(()), _block_size(p)
            for name in _MOMENTS:
                state[name] = torch.zeros_like(p, dtype=torch.uint8 if block else torch.float32)
                if block:
                    state[f"{name}_scale"] = _zeros_per_block(p, block)
        state["step"] += 1
        # Update some rows at a time, since they need float32 moments
        moments = {name: _local(value) for name, value in state.items() if name != "step"}
        values, gradient = _local(p), _local(p.grad)
        if not values.numel():
            return
        rows = CHUNK_VALUES // max(1, values[:1].numel()) or 1 if values.ndim else 1
        for start in range(0, len(values) if values.ndim else 1, rows):
            part = slice(start, start + rows) if values.ndim else ...
            chunk = {name: value[part] for name, value in moments.items()}
            _update_chunk(values[part], gradient[part], chunk, int(state["step"]), group)


def _update_chunk(
    p: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], step: int, group: dict[str, Any]
) -> None:
    """Apply one step of AdamW to some rows, in float32."""
    (beta1, beta2), lr, gradient = group["betas"], float(group["lr"]), gradient.float()
    first, second = (_load(state, name) for name in _MOMENTS)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    weights = p.float()  # p itself, or a copy of weights with fewer bits
    weights.mul_(1 - lr * group["weight_decay"])
    weights.addcdiv_(first, denominator, value=-lr / (1 - beta1**step))
    if weights is not p:
        p.copy_(weights)
    for name, moment in zip(_MOMENTS, (first, second), strict=True):
        _store(state, name, moment)


def _load(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a moment in float32: the state itself if it is not quantized."""
    if f"{name}_scale" not in state:
        return state[name]
    codes, scales = state[name], state[f"{name}_scale"][..., None]
    levels, _ = _levels(name, codes.device)
    moment = (levels[codes.int()].view(*scales.shape[:-1], -1) * scales).view(codes.shape)
    return moment if name == "exp_avg" else moment.square_()


def _store(state: dict[str, torch.Tensor], name: str, moment: torch.Tensor) -> None:
    """Round a moment to the nearest levels, unless :func:`_load` returned the state itself."""
    if moment is state[name]:
        return
    scales = state[f"{name}_scale"]
    blocks = (moment if name == "exp_avg" else moment.sqrt_()).view(*scales.shape, -1)
    scales.copy_(blocks.abs().amax(-1))
    _, limits = _levels(name, moment.device)
    shares = blocks / scales[..., None].clamp(min=torch.finfo(scales.dtype).tiny)
    state[name].copy_(torch.bucketize(shares, limits, out_int32=True).view(moment.shape))


@cache
def _levels(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 256 levels of a moment as shares of the scale, and the limits between them.

    Dettmers et al. (2022), section 2: a share has a decimal exponent from -6 to 0 and a linear fraction. The number of
    fractions doubles with the exponent. The second moment has no sign, so twice as many.
    """
    signed = name == "exp_avg"
    positive = [1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent if signed else exponent + 1) + 1, dtype=torch.float64)
        positive += ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)).tolist()
    negative = [-level for level in positive if level < 1] if signed else []
    levels = torch.tensor(sorted([*negative, 0.0, *positive]), dtype=torch.float64)
    return levels.float().to(device), ((levels[1:] + levels[:-1]) / 2).float().to(device)


def _block_size(p: torch.Tensor) -> int | None:
    """Return the number of values that share a scale, or None for float32 moments."""
    if p.ndim < 2 or p.numel() < MIN_VALUES:
        return None
    lengths = (p.shape[-1], _local(p).shape[-1])  # a shard of columns has shorter rows
    return next((size for size in BLOCK_SIZES if not any(length % size for length in lengths)), None)


def _zeros_per_block(p: torch.Tensor, block: int) -> torch.Tensor:
    """Return float32 zeros, one per block, sharded like the parameter."""
    local = _local(p)
    zeros = torch.zeros((*local.shape[:-1], local.shape[-1] // block), device=local.device)
    if not isinstance(p, DTensor):
        return zeros
    shape = torch.Size((*p.shape[:-1], p.shape[-1] // block))
    stride = torch.empty(shape, device="meta").stride()
    placed = DTensor.from_local(zeros, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)
    return placed.to(local.device)  # from_local moves offloaded shards to the device of the mesh


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class JointOptimizer(torch.optim.Optimizer):
    """Optimizer whose groups and states are those of its parts, each of which steps its own groups.

    The parts have different parameters, and have not stepped yet.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient."""
        loss = _call_closure(closure)
        for part in self.parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further groups after the optimizer was made, because no part would step them."""
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
        loss = _call_closure(closure)
        for p, group in _with_gradient(self):
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
    """Build Muon for groups of hidden matrices and AdamW for groups of all other parameters, as one optimizer.

    ``lr`` and ``weight_decay`` are of both, ``betas`` and ``eps`` of AdamW, the others of Muon. The default
    ``adjust_lr_fn`` gives both updates the same size (Liu et al. 2025, arXiv 2502.16982); the other is ``"original"``.
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
    bit for bit that of the optimizer without offload, whose update of a parameter must not depend on other parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__([optimizer])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient, some at a time."""
        loss = _call_closure(closure)
        gradients = {p: p.grad for p, _ in _with_gradient(self)}
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
        _load_as_saved(self, state_dict, "cpu")

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
        if chunk and size + _local(p).nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(p)
        size += _local(p).nbytes
    if chunk:
        yield chunk


def _call_closure(closure: Callable[[], float] | None) -> float | None:
    """Return the loss of a step's closure, which computes gradients again; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _with_gradient(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
    """Yield each parameter that has a gradient, and its group."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield p, group


def _load_as_saved(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], device: torch.device | str | None = None
) -> None:
    """Load groups and states into an optimizer, without torch's conversion to the type of the parameters.

    States with dimensions go to ``device``, or to that of their parameter; scalars keep theirs.
    """
    states, saved = state_dict["state"], state_dict["param_groups"]
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    numbers = [number for group in saved for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def place(value: Any, p: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device or p.device, copy=True) if value.ndim else value.clone()

    for number, p in zip(numbers, parameters, strict=True):
        if number in states:
            optimizer.state[p] = {name: place(value, p) for name, value in states[number].items()}
