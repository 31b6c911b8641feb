""""""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.diagnostics.report import write_report
from torchrl_rloo.evaluation.calibration import (
    brier_score,
    calibrate,
    fit_temperature,
    negative_log_likelihood,
    plot_calibration,
    reliability,
    write_calibration,
)


@pytest.fixture
def margins() -> torch.Tensor:
    """Margins of a model whose scores are three times too large."""
    g = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(3000, generator=g)
    return torch.where(torch.rand(3000, generator=g) < logits.sigmoid(), logits, -logits) * 3


def test_a_temperature_repairs_a_bragging_model(margins):
    found = calibrate(margins)
    assert found.temperature == pytest.approx(3, rel=0.1) and not found.separable and found.pairs == 3000
    assert found.after.ece < 0.03 < 0.1 < found.before.ece
    assert found.after.nll < found.before.nll and found.after.brier < found.before.brier
    assert found.interval[0] < found.accuracy == float((margins > 0).double().mean()) < found.interval[1]
    assert sum(b.count for b in found.before.bins) == 3000
    inside = [b.interval[0] <= b.confidence <= b.interval[1] for b in found.after.bins if b.count]
    assert sum(inside) >= len(inside) - 2  # 95 % intervals
    assert sum(b.interval[0] <= b.confidence <= b.interval[1] for b in found.before.bins if b.count) < sum(inside)


def test_order_and_scale_of_scores_do_not_matter(margins):
    found, other = calibrate(margins), calibrate(margins.flip(0) * 7)
    assert other.temperature == pytest.approx(7 * found.temperature)
    assert other.after.nll == pytest.approx(found.after.nll) and other.accuracy == found.accuracy


def test_no_errors_at_all():
    found = calibrate(torch.linspace(3, 6, 50))
    assert found.separable and found.accuracy == 1.0 and math.isfinite(found.temperature)
    assert 1 / (1 + math.exp(-3 / found.temperature)) < 0.999


def test_files_next_to_a_model(margins, tmp_path):
    found = calibrate(margins, bins=7)
    path = write_calibration(found, tmp_path / "model")
    record = json.loads(path.read_text())
    assert path == tmp_path / "model" / "calibration.json" and record["temperature"] == found.temperature
    assert len(record["after"]["bins"]) == 7 and record["before"]["ece"] == found.before.ece
    assert (tmp_path / "model" / "calibration.png").stat().st_size > 10_000


def test_bins_without_pairs_are_null_in_the_file_and_left_out_of_the_picture(tmp_path):
    path = write_calibration(calibrate(torch.tensor([9.0, 9.0, -9.0, 0.0])), tmp_path)
    bins = json.loads(path.read_text())["before"]["bins"]
    assert bins[0]["accuracy"] == 0.5 and bins[4] == {
        "low": pytest.approx(0.7),
        "high": pytest.approx(0.75),
        "count": 0,
        "confidence": None,
        "accuracy": None,
        "interval": None,
    }


def test_the_picture_goes_into_the_report_behind_the_curves(margins, tmp_path):
    picture = plot_calibration(calibrate(margins), tmp_path / "c.png")
    history = [{"step": 0, "loss": 1.0}]
    page = write_report(
        tmp_path, history=history, summary={"a": 1}, settings={"b": 2}, figures={"Calibration": picture}, title="A < B"
    )
    text = page.read_text()
    places = [text.index(f"<h2>{title}</h2>") for title in ("Summary", "Curves", "Calibration", "Settings")]
    assert places == sorted(places) and text.count("data:image/png;base64,") == 1 and "<h1>A &lt; B</h1>" in text


def test_impossible_arguments(margins):
    with pytest.raises(ValueError, match="bins=0"):
        calibrate(margins, bins=0)
    with pytest.raises(ValueError, match="all finite"):
        calibrate(torch.tensor([math.inf]))


# Statistics of margins


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
