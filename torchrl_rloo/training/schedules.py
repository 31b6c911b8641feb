"""Learning-rate schedules by name, with a warmup."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from torchrl_rloo.runtime.lookup import did_you_mean

LENGTHS = ("T_max", "total_iters", "total_steps")  # arguments of torch's schedules that default to the steps of the run
# They read a metric, are made of functions or of other schedules, or are no schedule
_WITHOUT_A_TABLE = ("ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")
_WITHOUT_A_TABLE += ("LRScheduler",)
TORCH_SCHEDULES = {
    name: value
    for name, value in vars(lr_scheduler).items()
    if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and name not in _WITHOUT_A_TABLE
}
SCHEDULES = ("linear", "cosine", "constant", *sorted(name for name in TORCH_SCHEDULES if not name.startswith("_")))


def make_schedule(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    /,
    name: str = "linear",
    *,
    warmup_steps: int | None = None,
    final_fraction: float | None = None,
    **kwargs: Any,
) -> lr_scheduler.LambdaLR:
    """Schedule the learning rate by name.

    With ``peak`` the learning rate of the optimizer, step ``s`` has ``peak * min(1, (s + 1) / warmup_steps) * f(s)``.
    ``f`` falls from 1 to ``final_fraction`` for ``"linear"`` and ``"cosine"``, and is 1 for ``"constant"``. For a class
    of ``torch.optim.lr_scheduler`` it is the rate of the class divided by ``peak``.

    The state of a schedule is its number of steps, so a resumed run takes the rates of its current settings.

    Args:
        optimizer: optimizer whose learning rates are the peak.
        total_steps: optimizer steps of the run.
        name: ``"linear"``, ``"cosine"``, ``"constant"``, or a class of ``torch.optim.lr_scheduler`` such as
            ``"StepLR"``.
        warmup_steps: steps of the warmup. None takes 5, or a tenth of a run shorter than 50 steps.
        final_fraction: share of the peak at the end, in [0, 1]; only for linear and cosine. None takes 0.1.
        **kwargs: arguments of the class. ``T_max``, ``total_iters`` and ``total_steps`` default to the steps of the
            run, and ``cycle_momentum`` to False.

    Returns:
        A schedule to be stepped after every optimizer step.

    Raises:
        ValueError: if a name is unknown, a number is out of range, or an argument has no effect.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> schedule, rates = make_schedule(optimizer, 4, "StepLR", warmup_steps=2, step_size=2), []
        >>> for _ in range(4):
        ...     rates.append(round(schedule.get_last_lr()[0], 3))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.5, 1.0, 0.1, 0.1]
    """
    if warmup_steps is None:
        warmup_steps = min(5, total_steps // 10)
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be at least 1")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be between 0 and total_steps={total_steps}; lower it")
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r}: unknown{did_you_mean(name, SCHEDULES)}; valid: {', '.join(SCHEDULES)}")
    # Build a factor for each group, since arguments such as eta_min are learning rates
    if name in TORCH_SCHEDULES:
        if final_fraction is not None:
            raise ValueError(f"final_fraction={final_fraction} has no effect with schedule {name!r}; set it to null")
        rates = {group["lr"]: None for group in optimizer.param_groups}
        rates = {peak: _tabulate(name, float(peak), total_steps, kwargs) for peak in rates}
        factors = [rates[group["lr"]] for group in optimizer.param_groups]
    else:
        if kwargs:
            raise ValueError(f"unknown names {list(kwargs)} for schedule {name!r}, which has no arguments; remove them")
        factors = [_closed_form(name, total_steps, final_fraction)] * len(optimizer.param_groups)

    def warmed(factor: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: min(1.0, (step + 1) / max(1, warmup_steps)) * factor(step)

    return lr_scheduler.LambdaLR(optimizer, [warmed(factor) for factor in factors])


def catch_up(scheduler: lr_scheduler.LRScheduler, steps: int) -> None:
    """Step a schedule up to ``steps``, after a batch that gave fewer updates than planned."""
    while scheduler.last_epoch < steps:
        scheduler.step()


def _closed_form(name: str, total_steps: int, final_fraction: float | None) -> Callable[[int], float]:
    """Return the factor of a schedule of ours at each step."""
    if name == "constant":
        if final_fraction is not None:
            raise ValueError(f"final_fraction={final_fraction} has no effect with schedule {name!r}; set it to null")
        return lambda step: 1.0
    final = 0.1 if final_fraction is None else final_fraction
    if not 0 <= final <= 1:
        raise ValueError(f"final_fraction={final} must be between 0 and 1")
    if name == "cosine":
        return lambda step: final + (1 - final) * (1 + math.cos(math.pi * min(1.0, step / total_steps))) / 2
    return lambda step: 1 - min(1.0, step / total_steps) * (1 - final)


def _tabulate(name: str, peak: float, total_steps: int, kwargs: dict[str, Any]) -> Callable[[int], float]:
    """Return the factor at each step of a torch schedule, which runs once on an optimizer without parameters to train.

    A table has no state, so resuming and extending a run cannot mix two schedules. It ends with the last step.
    """
    cls = TORCH_SCHEDULES[name]
    known = [n for n in inspect.signature(cls).parameters if n not in ("optimizer", "last_epoch", "verbose")]
    if unknown := [n for n in kwargs if n not in known]:
        hint = did_you_mean(str(unknown[0]), known)
        raise ValueError(f"unknown names {unknown} for schedule {name!r}{hint}; valid: {', '.join(known)}")
    if kwargs.get("cycle_momentum"):
        raise ValueError(f"cycle_momentum=True has no effect with schedule {name!r}, which sets the rate; remove it")
    if peak == 0:
        raise ValueError(f"lr=0.0 cannot be scheduled by {name!r}; set a learning rate above 0")
    lengths = {n: total_steps for n in LENGTHS if n in known}
    fixed = {"cycle_momentum": False} if "cycle_momentum" in known else {}
    # Run it
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    try:
        schedule = cls(optimizer, **lengths | fixed | kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"schedule {name!r}: {str(error).replace(f'{name}.__init__() ', '')}") from error
    table = [schedule.get_last_lr()[0] / peak]
    for _ in range(total_steps):
        optimizer.step()
        try:
            schedule.step()
        except ValueError as error:  # OneCycleLR with fewer total_steps
            raise ValueError(f"schedule {name!r} ends before step {total_steps} of the run: {error}") from error
        table.append(schedule.get_last_lr()[0] / peak)
    return lambda step: table[min(step, total_steps)]
