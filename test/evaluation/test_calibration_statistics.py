from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.evaluation.calibration import (
    brier_score,
    fit_temperature,
    negative_log_likelihood,
    reliability,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def drawn_margins(scale: float, n: int = 20_000, seed: int = 0) -> torch.Tensor:
    """Draw margins of a model that is calibrated at temperature ``scale``."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, dtype=torch.double, generator=g)
    label_is_first = torch.rand(n, dtype=torch.double, generator=g) < logits.sigmoid()
    return torch.where(label_is_first, logits, -logits) * scale


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0, 100.0])
def test_the_temperature_that_margins_were_drawn_with_is_found(scale):
    assert fit_temperature(drawn_margins(scale)) == pytest.approx(scale, rel=0.05)


def test_the_fit_is_the_minimum_of_the_likelihood():
    margins = drawn_margins(3.0, n=400)
    found, n = fit_temperature(margins), len(margins)

    def loss(temperature: float) -> float:
        return sum(
            -(n + 1) / (n + 2) * math.log(sigmoid(m / temperature)) - math.log(sigmoid(-m / temperature)) / (n + 2)
            for m in margins.tolist()
        )

    grid = [found * (0.5 + k / 200) for k in range(201)]
    assert abs(min(grid, key=loss) - found) <= found / 200
    assert fit_temperature(margins * 10) == pytest.approx(10 * found)


def test_what_cannot_be_fitted_has_a_defined_temperature():
    right = torch.full((98,), 5.0)
    separable = fit_temperature(right)  # all margins positive: as confident as 98 correct predictions allow
    assert sigmoid(5 / separable) == pytest.approx(99 / 100)
    assert fit_temperature(torch.cat([right, right])) < separable
    assert fit_temperature(-right) == 1e3  # worse than chance: the largest temperature
    assert fit_temperature(torch.tensor([1.0, -1.0]), bounds=(0.5, 20.0)) == 20.0
    assert fit_temperature(right, bounds=(2.0, 20.0)) == 2.0
    assert fit_temperature(torch.zeros(3)) == 1.0
    for bad in (torch.zeros(0), torch.tensor([1.0, math.nan])):
        with pytest.raises(ValueError, match="all finite"):
            fit_temperature(bad)
    with pytest.raises(ValueError, match="ascending"):
        fit_temperature(right, bounds=(2.0, 1.0))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-8, 8) | st.just(0.0), min_size=1, max_size=40), st.integers(1, 12))
def test_scores_equal_a_slow_loop(values, bins):
    margins = torch.tensor(values, dtype=torch.double)
    cells = [[] for _ in range(bins)]
    for m in values:
        confidence = sigmoid(abs(m))
        cells[min(int((confidence - 0.5) * 2 * bins), bins - 1)].append((confidence, 0.5 if m == 0 else float(m > 0)))
    gaps = [abs(sum(c for c, _ in cell) - sum(r for _, r in cell)) for cell in cells]
    curve = reliability(margins, bins)
    assert curve.counts.tolist() == [len(cell) for cell in cells]
    assert float(curve.expected_calibration_error) == pytest.approx(sum(gaps) / len(values), abs=1e-9)
    assert float(negative_log_likelihood(margins)) == pytest.approx(
        sum(-math.log(sigmoid(m)) for m in values) / len(values)
    )
    assert float(brier_score(margins)) == pytest.approx(sum((1 - sigmoid(m)) ** 2 for m in values) / len(values))


def test_a_calibrated_model_has_no_error_and_a_bragging_one_has():
    assert float(reliability(drawn_margins(1.0)).expected_calibration_error) < 0.01
    assert float(reliability(drawn_margins(5.0)).expected_calibration_error) > 0.1
