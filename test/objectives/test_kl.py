from __future__ import annotations

import logging
import math
import re

import pytest

from torchrl_rloo.objectives.kl import KL, AdaptiveEntropyCoefficient, AdaptiveKLCoefficient


def test_the_kl_coefficient_follows_a_slow_loop():
    coefficient, expected = AdaptiveKLCoefficient(0.2, target=6.0, horizon=1000), 0.2
    assert float(coefficient) == 0.2
    for kl, error in ((6.0, 0.0), (6.6, 0.1), (100.0, 0.2), (5.4, -0.1), (-3.0, -0.2)):
        coefficient.update(kl, num_samples=64)
        expected *= 1 + error * 64 / 1000
        assert float(coefficient) == pytest.approx(expected)


def test_a_resumed_controller_continues_the_same(caplog):
    first, second = (AdaptiveKLCoefficient(0.1, target=0.5, horizon=300) for _ in range(2))
    for value in (0.3, 0.55, 0.8):
        first.update(value, 7)
    second.load_state_dict(first.state_dict())
    with caplog.at_level(logging.WARNING):  # a missing measurement changes nothing
        second.update(math.nan, 8)
    assert float(second) == float(first) and len(caplog.records) == 1
    for value in (0.45, 0.9, 0.1):
        first.update(value, 7), second.update(value, 7)
        assert float(second) == float(first) and second.state_dict() == first.state_dict()


def test_a_window_leaves_the_coefficient_alone_inside_and_holds_its_bounds():
    coefficient = KL("loss", 0.1, target=[0.5, 2.0]).coeff
    for kl in (0.5, 1.0, 2.0):
        coefficient.update(kl, num_samples=1000)
    assert float(coefficient) == 0.1
    for kl, bound in ((0.25, 0.5), (6.0, 2.0)):
        window, single = (AdaptiveKLCoefficient(0.1, target) for target in ((0.5, 2.0), bound))
        for each in (window, single):
            each.update(kl, num_samples=1000)
        assert float(window) == float(single) != 0.1


def test_the_entropy_coefficient_moves_by_steps_and_is_off_above_the_target(caplog):
    coefficient = AdaptiveEntropyCoefficient(target=0.5, initial=0.25, step=0.25, maximum=0.5)
    seen, inner = [float(coefficient)], [0.25]
    for entropy in (0.4, 0.3, 0.6, 0.5, float("nan"), 0.9, 0.8, 0.7, 0.1):
        coefficient.update(entropy)
        resumed = AdaptiveEntropyCoefficient(target=0.5, step=0.25, maximum=0.5)
        resumed.load_state_dict(coefficient.state_dict())
        coefficient = resumed
        seen.append(float(coefficient)), inner.append(coefficient.state_dict()["value"])
    assert seen == [0, 0.5, 0.5, 0, 0.5, 0.5, 0, 0, 0, 0.25] and "entropy=nan is not finite" in caplog.text
    assert inner == [0.25, 0.5, 0.5, 0.25, 0.5, 0.5, 0.25, 0, 0, 0.25]
    for wrong in ({"target": 0}, {"step": -1}, {"initial": 2}, {"minimum": 0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            AdaptiveEntropyCoefficient(**wrong)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AdaptiveKLCoefficient(0.0, 1.0), "initial=0.0"),
        (lambda: AdaptiveKLCoefficient(0.1, -1.0), "target=-1.0"),
        (lambda: AdaptiveKLCoefficient(0.1, (0.0, 1.0)), "target=0.0 must be a number above 0"),
        (lambda: AdaptiveKLCoefficient(0.1, (2.0, 1.0)), "target=(2.0, 1.0) must be a number, or a window"),
        (lambda: AdaptiveKLCoefficient(0.1, [1.0]), "target=[1.0] must be a number, or a window"),
        (lambda: AdaptiveKLCoefficient(0.1, 1.0, 0), "horizon=0"),
        (lambda: AdaptiveKLCoefficient(0.1, 1.0, math.nan), "horizon=nan"),
        (lambda: AdaptiveKLCoefficient(0.1, 1.0, 10).update(1.0, 50), "num_samples=50"),
    ],
)
def test_arguments_are_checked(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()
