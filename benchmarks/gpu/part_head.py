"""Part ``head``: time, memory and error of log-prob heads, from hidden states to the gradients and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measure import SHAPES, Setup, attempt, clear, peak_bytes, relative_error, timed_ms

from torchrl_rloo.functional import token_log_probs

REFERENCE_ROWS = 512  # positions of the float64 reference at once

Method = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the negative log-probs with ``token_log_probs``, without entropies."""
    return -token_log_probs(hidden, weight, targets, entropy=False).log_probs.sum()


def ours_with_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the negative log-probs with ``token_log_probs``, which also computes entropies, as ``RLOOLoss`` does."""
    return -token_log_probs(hidden, weight, targets).log_probs.sum()


def full_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the cross entropies of all logits, stored in float32."""
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


def liger(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the cross entropies with Liger's fused kernel, which computes the gradient in its forward pass."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)


def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the cross entropies with PyTorch's function, which torch 2.11 lacks."""
    return torch.nn.functional.linear_cross_entropy(hidden, weight, targets, reduction="sum")


def trl_log_probs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *outputs: str) -> torch.Tensor:
    """Sum the negative log-probs with the kernel of TRL's trainers."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    names = ("log_probs", *outputs)
    scored = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, names
    )
    return -scored[0].sum()


def trl_with_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the negative log-probs with the kernel of TRL's trainers, and the entropies that ``RLOOTrainer`` requests."""
    return trl_log_probs(hidden, weight, targets, "entropy")


METHODS: dict[str, Method] = {
    "ours": ours,
    "ours, entropy": ours_with_entropy,
    "TRL": trl_log_probs,
    "TRL, entropy": trl_with_entropy,
    "Liger": liger,
    "linear_cross_entropy": linear_cross_entropy,
    "full logits": full_logits,
}


def reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the loss and its gradients in float64, some positions at a time."""
    weight = weight.detach().double().requires_grad_()
    loss, gradients = torch.zeros((), dtype=torch.float64, device=hidden.device), []
    for part, ids in zip(hidden.detach().split(REFERENCE_ROWS), targets.split(REFERENCE_ROWS), strict=True):
        leaf = part.double().requires_grad_()
        value = torch.nn.functional.cross_entropy(leaf @ weight.T, ids, reduction="sum")
        value.backward()
        loss += value.detach()
        gradients.append(leaf.grad)
    return loss, torch.cat(gradients), weight.grad


def measure(method: Method, inputs: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], setup: Setup):
    """Measure the errors, time and peak memory of one method."""
    hidden, weight, targets = inputs

    def backward() -> torch.Tensor:
        hidden.grad = weight.grad = None
        loss = method(hidden, weight, targets)
        loss.backward()
        return loss.detach()

    found = (backward().clone(), hidden.grad, weight.grad)
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    del found
    hidden.grad = weight.grad = None
    result = dict(zip(("loss_error", "hidden_error", "weight_error"), errors, strict=True))
    result["peak_bytes"] = peak_bytes(backward, setup.device)
    result["ms"] = timed_ms(backward, setup)
    with torch.no_grad():
        result["forward_ms"] = timed_ms(lambda: method(hidden, weight, targets), setup)
    return result


def run(setup: Setup) -> dict[str, Any]:
    """Measure every method at the sizes of both models."""
    results: dict[str, Any] = {}
    for size in setup.pick(("0.5B", "1.5B"), ("tiny",)):
        shape, tokens = SHAPES[size], setup.pick(16_384, 40)
        torch.manual_seed(0)
        make = {"device": setup.device, "dtype": setup.dtype}
        hidden = torch.randn(tokens, shape["hidden_size"], **make).requires_grad_()
        weight = (0.02 * torch.randn(shape["vocab_size"], shape["hidden_size"], **make)).requires_grad_()
        targets = torch.randint(shape["vocab_size"], (tokens,), device=setup.device)
        expected = reference(hidden, weight, targets)
        # Three products of the size of the logits; methods that recompute the logits need four
        figures: dict[str, Any] = {"tokens": tokens, "flops": 6 * tokens * weight.numel()}
        for name, method in METHODS.items():
            clear(setup.device)
            figures[name] = attempt(measure, method, (hidden, weight, targets), expected, setup)
            hidden.grad = weight.grad = None
        results[size] = figures
        setup.keep(results)
    return results
