"""Gradients of losses with respect to the parameters of a model, and their comparison."""

from __future__ import annotations

import torch


def gradient_of(model: torch.nn.Module, *losses: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of the sum of losses for each parameter, zeros if it has none."""
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same_gradient(ours: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Compare in units of the largest norm of an expected gradient."""
    scale = max(float(g.norm()) for g in expected)
    for a, b in zip(ours, expected, strict=True):
        assert float((a.double() - b.double()).norm()) <= tolerance * max(scale, 1e-8)
