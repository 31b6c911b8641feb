"""Products of float32 matrices on CPU cores, with oneDNN instead of MKL.

torch multiplies float32 matrices with MKL, which uses half of the width of AVX-512 on AMD's cores. oneDNN, which torch
has on board, uses all of it. It adds in another order, and in the same order for any number of rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

_MODEL_ELEMENTS = 2**25  # with 0.15 million parameters a step takes 1.2 times as long in the context
_AVX512 = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
_AVX512 = _AVX512 and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # a private operator; without it torch multiplies


def has_fast_product(*tensors: torch.Tensor) -> bool:
    """Return whether :func:`fast_product` multiplies these tensors."""
    return _AVX512 and all(
        t.device.type == "cpu" and t.dtype == torch.float32 and type(t) in (torch.Tensor, torch.nn.Parameter)
        for t in tensors
    )


def fast_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b.T`` of float32 matrices ``[n, k]`` and ``[m, k]`` with any strides, without gradient."""
    if not a.numel() or not b.numel():
        return a @ b.T
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add ``a @ b.T`` to ``total``, without gradient."""
    if has_fast_product(total, a, b):
        total += fast_product(a, b)
    else:
        total.addmm_(a, b.T)


def fast_layers(model: torch.nn.Module) -> AbstractContextManager:
    """Return :class:`FastLayers` for a model whose products outlast the context's cost for each call of torch."""
    enough = _AVX512 and sum(parameter.numel() for parameter in model.parameters()) >= _MODEL_ELEMENTS
    return FastLayers() if enough else nullcontext()


class FastLayers(TorchFunctionMode):
    """Context in which linear layers use :func:`fast_product`, forward and backward, where it multiplies them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and not torch.is_autocast_enabled("cpu"):
            if has_fast_product(*(t for t in args if t is not None)):
                return _Linear.apply(*args)
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """``F.linear`` of float32 matrices."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight)
        y = fast_product(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        g, (needs_x, needs_weight, *needs_bias) = grad.flatten(0, -2), ctx.needs_input_grad
        return (
            fast_product(g, weight.T).view_as(x) if needs_x else None,
            fast_product(g.T, x.flatten(0, -2).T) if needs_weight else None,
            *(g.sum(0) if needs else None for needs in needs_bias),
        )
