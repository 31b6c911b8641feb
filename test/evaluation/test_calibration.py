from __future__ import annotations

import json
import math

import pytest
import torch

from torchrl_rloo.diagnostics.report import write_report
from torchrl_rloo.evaluation.calibration import calibrate, plot_calibration, write_calibration


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
