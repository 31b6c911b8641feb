"""AdamW with moments of 8 bits, for whole and sharded parameters.

bitsandbytes' optimizer rejects parameters of FSDP2, its blocks cross rows, and on the CPU up to a tenth of its codes
are not the nearest. torchao's compiles a kernel for each shape, and its states are no plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchrl_rloo.training.stepping import call_closure, load_as_saved, with_gradient

BLOCK_SIZES = (256, 128, 64)  # values that share a scale: the largest one that divides the length of a row
MIN_VALUES = 4096  # smaller parameters, such as biases and norms, keep float32 moments
CHUNK_VALUES = 2**23  # values per pass, which bounds the float32 copies of the moments
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with moments of 8 bits.

    A block of up to 256 values of a row shares a float32 scale (Dettmers et al. 2022, arXiv 2110.02861). Of the second
    moment the square root is stored, whose range is that of the gradient. Blocks stay within rows. So parameters
    sharded by rows have the moments of whole ones, also when another number of ranks loads a checkpoint.

    Parameters with fewer than 4096 values, vectors, and those whose rows are no multiple of 64 keep float32 moments.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the mean gradient and its square.
        eps: term added to the denominator.
        weight_decay: decoupled weight decay, multiplied by ``lr``.

    Raises:
        ValueError: if a number is out of range.
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
        loss = call_closure(closure)
        for p, group in with_gradient(self):
            self._update(p, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and moments; torch would convert the codes to the type of the parameters."""
        load_as_saved(self, state_dict)

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
