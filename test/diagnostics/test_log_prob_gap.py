from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.diagnostics.parity import LogProbGap, log_prob_gap

NAN = float("nan")
pair = st.tuples(st.floats(-8, 0), st.floats(-2, 2)).map(lambda p: (p[0], p[0] + p[1]))
batches = st.lists(st.lists(pair, max_size=5), min_size=1, max_size=5)  # also without a token


def padded(rows, width: int | None = None, fill: float = 0.0):
    width = max([len(row) for row in rows]) if width is None else width
    sampler, trainer = (torch.full((len(rows), width), fill, dtype=torch.float64) for _ in range(2))
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        for t, (x, y) in enumerate(row):
            sampler[i, t], trainer[i, t], mask[i, t] = x, y, True
    return sampler, trainer, mask


def slow_ess(weights):
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights)) if weights else NAN


def slow_gap(rows) -> dict[str, float]:
    differences = [y - x for row in rows for x, y in row]
    n = len(differences)
    if n == 0:
        return dict.fromkeys(LogProbGap._fields, NAN) | {"tokens": 0}
    return {
        "mean": math.fsum(abs(d) for d in differences) / n,
        "max": max(abs(d) for d in differences),
        "k3": math.fsum(math.exp(d) - 1 - d for d in differences) / n,
        "row_ess": slow_ess([math.prod(math.exp(y - x) for x, y in row) for row in rows if row]),
        "outside_share": sum(not 0.9 <= math.exp(d) <= 1.1 for d in differences) / n,
        "surprisal": -math.fsum(x for row in rows for x, _ in row) / n,
        "tokens": n,
    }


def close(gap: LogProbGap, expected) -> None:
    expected = expected._asdict() if isinstance(expected, LogProbGap) else expected
    for name, value in gap._asdict().items():
        assert value.shape == () and value.dtype == torch.float64
        assert float(value) == pytest.approx(float(expected[name]), rel=1e-9, abs=1e-12, nan_ok=True), name


@settings(deadline=None, max_examples=60)
@given(batches)
def test_equals_a_slow_loop(rows):
    close(log_prob_gap(*padded(rows)), slow_gap(rows))


@settings(deadline=None, max_examples=30)
@given(batches, st.integers(0, 4), st.sampled_from([7.0, NAN, -math.inf]))
def test_padding_does_not_matter(rows, more, fill):
    width = max(len(row) for row in rows) + more
    close(log_prob_gap(*padded(rows, width, fill)), log_prob_gap(*padded(rows)))
    close(log_prob_gap(*padded([[], *rows, []])), log_prob_gap(*padded(rows)))


@settings(deadline=None, max_examples=30)
@given(batches, batches)
def test_batches_put_together_are_one_batch(first, second):
    width = max(len(row) for row in first + second)
    together = (torch.cat(pair) for pair in zip(padded(first, width), padded(second, width), strict=True))
    close(log_prob_gap(*together), slow_gap(first + second))


def test_the_gap_of_float32_log_probs_is_not_rounded_away():
    sampler = torch.tensor([[-1.0, -1.0, -1.0]])
    trainer = sampler + torch.tensor([[2.0**-20, 0.0, 0.0]])
    gap = log_prob_gap(sampler, trainer, torch.ones(1, 3, dtype=torch.bool))
    assert gap.mean == 2.0**-20 / 3 and gap.max == 2.0**-20
    assert gap.k3.item() == pytest.approx(2.0**-40 / 2 / 3, rel=1e-3)


@pytest.mark.parametrize(("ratio", "outside"), [(0.89, 1), (0.91, 0), (1.09, 0), (1.11, 1)])
def test_bounds_of_the_ratio(ratio, outside):
    trainer = torch.tensor([[math.log(ratio)]])
    assert log_prob_gap(torch.zeros(1, 1), trainer, torch.ones(1, 1, dtype=torch.bool)).outside_share == outside


@pytest.mark.parametrize("sampler", [NAN, -math.inf])
def test_what_is_not_finite_shows(sampler):
    gap = log_prob_gap(torch.tensor([[sampler, -1.0]]), torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool))
    assert not gap.mean.isfinite() and not gap.max.isfinite() and gap.outside_share == 0.5


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_temperature_that_one_side_leaves_out_is_found(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(8, 20, 50, generator=generator)
    sampled = (logits / temperature).softmax(-1).flatten(0, 1).multinomial(1, generator=generator).view(8, 20, 1)
    of = [(logits / t).log_softmax(-1).gather(-1, sampled)[..., 0] for t in (temperature, 1.0)]
    gap = log_prob_gap(*of, torch.ones(8, 20, dtype=torch.bool))
    assert gap.mean > 0.1 and gap.outside_share > 0.5 and gap.row_ess < 0.9
    exact = log_prob_gap(of[0], of[0].double() + 1e-6, torch.ones(8, 20, dtype=torch.bool))
    assert exact.mean < 2e-6 and exact.outside_share == 0


def test_no_gradient():
    trainer = torch.zeros(1, 2, requires_grad=True)
    gap = log_prob_gap(torch.zeros(1, 2), trainer, torch.ones(1, 2, dtype=torch.bool))
    assert not any(value.requires_grad for value in gap)
