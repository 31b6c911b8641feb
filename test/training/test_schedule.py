"""Learning-rate schedules, against formulas and the classes of torch."""

from __future__ import annotations

import math

import pytest
import torch

from torchrl_rloo.training import catch_up, make_schedule
from torchrl_rloo.training.schedules import SCHEDULES


def rates(total: int, name: str = "linear", **kwargs) -> list[float]:
    """Return the learning rates of all optimizer steps and the one after them, as shares of the first group's."""
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 2.0}, {"params": [torch.zeros(1)], "lr": 0.5}])
    schedule = make_schedule(optimizer, total, name, **{"warmup_steps": 0} | kwargs)
    found = []
    for _ in range(total + 1):
        first, second = schedule.get_last_lr()
        assert second == first / 4 and optimizer.param_groups[0]["lr"] == first
        found.append(first / 2.0)
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(
    ("total", "warmup"), [(4, 0), (8, 4), (9, None), (20, None), (49, None), (50, None), (300, None)]
)
def test_rates_equal_their_formulas(name, total, warmup):
    """Compare with formulas; the default rise takes a tenth of a run of ten steps or more, at most five."""
    rise = warmup if warmup is not None else {9: 0, 20: 2, 49: 4, 50: 5, 300: 5}[total]
    for final in (0.0, 0.5, 1.0):
        settings = {} if name == "constant" else {"final_fraction": final}
        expected = []
        for step in range(total + 1):
            done = step / total
            left = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}[name]
            share = final + (1 - final) * left if settings else 1.0
            expected.append(min(1.0, (step + 1) / rise if rise else 1.0) * share)
        assert rates(total, name, warmup_steps=warmup, **settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 5}, "warmup_steps=5 must be between 0 and total_steps=4"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"final_fraction": 1.5}, "final_fraction=1.5 must be between 0 and 1"),
    ],
    ids=["long", "negative", "growth"],
)
def test_numbers_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        rates(4, **settings)


# ------------------------------------------------------------------------------------------------------------- by name
def named_rates(total: int, name: str, /, **kwargs) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule, found = make_schedule(optimizer, total, name, **kwargs), []
    for _ in range(total):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


TORCH = {
    "ConstantLR": {"factor": 0.5},
    "CosineAnnealingLR": {"eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4},
    "ExponentialLR": {"gamma": 0.9},
    "LinearLR": {"start_factor": 0.5},
    "MultiStepLR": {"milestones": [3, 5]},
    "OneCycleLR": {"max_lr": 0.2},
    "PolynomialLR": {"power": 2.0},
    "StepLR": {"step_size": 4},
}


@pytest.mark.parametrize("name", TORCH)
def test_a_class_of_torch_gives_its_rates(name):
    length = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps"}.get(name)
    length = "total_iters" if name in ("ConstantLR", "LinearLR", "PolynomialLR") else length
    momentum = {"cycle_momentum": False} if name in ("CyclicLR", "OneCycleLR") else {}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    reference = getattr(torch.optim.lr_scheduler, name)(
        optimizer, **TORCH[name] | momentum | ({length: 12} if length else {})
    )
    expected = []
    for _ in range(12):
        expected.append(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
    assert named_rates(12, name, warmup_steps=0, **TORCH[name]) == pytest.approx(expected, rel=1e-12)
    warmed = [min(1, (s + 1) / 4) * rate for s, rate in enumerate(expected)]
    assert named_rates(12, name, warmup_steps=4, **TORCH[name]) == pytest.approx(warmed, rel=1e-12)


def test_all_classes_of_torch_are_covered():
    assert set(SCHEDULES) == {"linear", "cosine", "constant", *TORCH}


def test_groups_have_rates_of_their_peak():
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 0.2}, {"params": [torch.zeros(1)], "lr": 0.1}])
    schedule = make_schedule(optimizer, 10, "CosineAnnealingLR", warmup_steps=0, eta_min=0.05)
    optimizer.step()
    catch_up(schedule, 10)
    assert schedule.get_last_lr() == pytest.approx([0.05, 0.05])


def test_a_resumed_run_takes_the_rates_of_its_settings():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    short = make_schedule(optimizer, 4, "CosineAnnealingLR", warmup_steps=0)
    optimizer.step()
    catch_up(short, 2)
    longer = make_schedule(torch.optim.SGD([torch.zeros(1)], lr=0.1), 8, "CosineAnnealingLR", warmup_steps=0)
    longer.load_state_dict(short.state_dict())
    assert longer.last_epoch == 2
    longer.optimizer.step(), longer.step()
    assert longer.get_last_lr() == pytest.approx(named_rates(8, "CosineAnnealingLR", warmup_steps=0)[3:4])
    catch_up(longer, 20)  # beyond its end
    assert longer.get_last_lr() == pytest.approx([0.0], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("linaer", {}, "schedule 'linaer': unknown (did you mean 'linear'"),
        ("ReduceLROnPlateau", {}, "schedule 'ReduceLROnPlateau': unknown"),
        ("constant", {"final_fraction": 0.5}, "final_fraction=0.5 has no effect with schedule 'constant'"),
        ("StepLR", {"final_fraction": 0.5, "step_size": 1}, "final_fraction=0.5 has no effect with schedule 'StepLR'"),
        ("linear", {"T_max": 4}, "unknown names ['T_max'] for schedule 'linear'"),
        ("StepLR", {"stepsize": 4}, "unknown names ['stepsize'] for schedule 'StepLR' (did you mean 'step_size'?)"),
        ("StepLR", {}, "schedule 'StepLR': missing 1 required positional argument: 'step_size'"),
        ("OneCycleLR", {"max_lr": 1.0, "cycle_momentum": True}, "cycle_momentum=True has no effect"),
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 4}, "schedule 'OneCycleLR' ends before step 12 of the run"),
    ],
)
def test_arguments_without_effect_are_refused(name, settings, message):
    with pytest.raises(ValueError) as raised:
        named_rates(12, name, **settings)
    assert message in str(raised.value)
