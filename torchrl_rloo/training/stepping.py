"""Parts that the optimizers of this package share: closures, parameters with gradients, and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def call_closure(closure: Callable[[], float] | None) -> float | None:
    """Return the loss of a step's closure, which computes gradients again; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradient(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
    """Yield each parameter that has a gradient, and its group."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield p, group


def load_as_saved(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], device: torch.device | str | None = None
) -> None:
    """Load groups and states into an optimizer, without torch's conversion to the type of the parameters.

    Args:
        optimizer: optimizer to fill.
        state_dict: state of an optimizer with the same groups.
        device: device of states with dimensions. None takes that of their parameter. Scalars keep theirs.
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
