from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.plain_losses import plain_surrogate
from torchrl_rloo.functional.policy_loss import AGGREGATIONS, SURROGATES, VESPO, Clip, aggregate
from torchrl_rloo.functional.ratios import RATIOS, split_among_tokens, token_log_ratio

log_probs_of_tokens = st.floats(-6, -0.01)
tokens = st.lists(st.tuples(log_probs_of_tokens, log_probs_of_tokens, st.floats(-4, 4)), min_size=1, max_size=6)


def slow(surrogate: str, new: float, old: float, advantage: float, **chosen: float) -> tuple[float, float]:
    """Return the value of one token's loss and its derivative with respect to the log-prob."""
    log_prob = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    loss = plain_surrogate(surrogate, (log_prob - old).exp(), advantage, log_prob, old, **chosen)
    return loss.item(), torch.autograd.grad(loss, log_prob)[0].item() if loss.requires_grad else 0.0


CASES = {
    "clip": ("clip", {}),
    "asymmetric clip": ("clip", {"low": 0.1, "high": 0.6}),
    "dual clip": ("clip", {"dual": 3.0}),
    "asymmetric dual clip": ("clip", {"low": 0.3, "high": 0.28, "dual": 1.5}),
    "no clip": ("clip", {"low": 1.0, "high": math.inf}),
    "unclipped": ("unclipped", {}),
    "cispo": ("cispo", {}),
    "cispo, both sides": ("cispo", {"low": 0.4, "high": 0.5}),
    "sapo": ("sapo", {}),
    "steep sapo": ("sapo", {"tau_positive": 2.0, "tau_negative": 3.5}),
    "dppo": ("dppo", {}),
    "narrow dppo": ("dppo", {"delta": 0.02}),
    "dppo with KL": ("dppo", {"delta": 0.05, "divergence": "kl"}),
    "dro": ("dro", {}),
    "strong dro": ("dro", {"beta": 0.7}),
    "shaping": ("shaping", {}),
    "flat shaping": ("shaping", {"gamma": 0.5}),
    "vespo": ("vespo", {}),
    "other vespo": (
        "vespo",
        {"k_positive": 1.5, "k_negative": 2.5, "lambda_positive": 1.2, "lambda_negative": 0.7},
    ),
}


def near_a_corner(new, old, advantage, surrogate: str, chosen: dict) -> bool:
    """Return whether rounding could decide the side of a bound on which a token lies."""
    ratio, bounds = math.exp(new - old), []
    if surrogate in ("clip", "cispo"):
        bounds += [1 - chosen.get("low", 0.2), 1 + chosen.get("high", 0.2)]
        bounds += [chosen["dual"]] if chosen.get("dual") else []
    if surrogate == "dppo":
        p, q = math.exp(old), math.exp(new)
        shift = abs(p - q)
        if chosen.get("divergence") == "kl":
            shift = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        return abs(shift - chosen.get("delta", 0.15)) < 1e-9 or abs(ratio - 1) < 1e-9
    return any(abs(ratio - bound) < 1e-9 for bound in bounds)


@settings(deadline=None, max_examples=25)
@given(tokens)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_equal_a_slow_loop(name, rows):
    surrogate, chosen = CASES[name]
    rows = [row for row in rows if not near_a_corner(*row, surrogate, chosen)] or [(-1.0, -1.1, 0.5)]
    new, old, advantages = (x.clone()[None] for x in torch.tensor(rows, dtype=torch.float64).T)
    new.requires_grad_()
    log_ratio = token_log_ratio(new, old, torch.ones_like(new, dtype=torch.bool))
    loss = SURROGATES[surrogate](**chosen)(log_ratio, advantages, new, old)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    expected = torch.tensor([slow(surrogate, *row, **chosen) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(loss.detach()[0], expected[:, 0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient[0], expected[:, 1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "name", [name for name, (s, _) in CASES.items() if s in ("clip", "sapo", "dppo", "dro", "shaping")]
)
def test_gradcheck(name):
    """Gradients match finite differences, for surrogates without a stopped gradient."""
    surrogate, chosen = CASES[name]
    new = torch.tensor([[-0.9, -1.3, -0.4, -2.2, -0.2]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0, -1.9, -2.0, -1.1, -0.26]], dtype=torch.float64)
    for sign in (1.0, -1.0):
        advantages = sign * torch.tensor([[1.0, -2.0, 0.5, 3.0, 1.0]], dtype=torch.float64)
        check = lambda x, a=advantages: SURROGATES[surrogate](**chosen)(x - old, a, x, old)  # noqa: E731
        assert torch.autograd.gradcheck(check, new)


TOKENS_ONLY = ("dppo", "gmpo")
LEVELS = [(r, s) for r in RATIOS for s in SURROGATES if s != "shaping" and (r != "sequence" or s not in TOKENS_ONLY)]


@pytest.mark.parametrize(("low", "high"), [(0.4, None), (0.1, 0.3)])
def test_gmpo_is_the_geometric_mean_of_ratios_clipped_by_the_sign_of_the_advantage(low, high):
    new = torch.tensor([[-1.0, -0.5, -2.0, 9.0], [-1.0, -3.0, -0.1, -0.2]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.2, -1.4, -1.0, 0.0], [-0.2, -3.2, -0.9, -0.1]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    for advantages in ([1.5, -0.5], [-2.0, 0.7]):
        objective = 0.0
        for i, advantage in enumerate(advantages):
            product, length, sign = 1.0, int(mask[i].sum()), 1 if advantage > 0 else -1
            for t in range(length):
                rho = (new[i, t] - old[i, t]).exp()
                bounded = rho.clamp(math.exp(-low), math.exp(high or low))
                product = product * torch.minimum(rho**sign, bounded**sign) ** sign  # the paper's token-level clip
            objective = objective - product ** (1 / length) * advantage / len(new)
        (expected,) = torch.autograd.grad(objective, new)
        log_ratio, column = token_log_ratio(new, old, mask), torch.tensor(advantages, dtype=torch.float64)[:, None]
        surrogate = SURROGATES["gmpo"](low, high)
        loss = aggregate(surrogate(log_ratio, column, new, old, mask=mask), mask, "sequence_mean")
        (gradient,) = torch.autograd.grad(loss, new)
        torch.testing.assert_close(loss, objective, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
        clipped = surrogate.clipped(log_ratio, column, new, old)
        assert clipped[mask].any() and torch.equal(clipped[mask], expected[mask] == 0)


@settings(deadline=None, max_examples=25)
@given(tokens)
def test_the_dual_bound_is_the_two_sided_clip_of_trl(rows):
    """TRL's delta first bounds the ratio: min(min(rho, delta) A, clip(rho) A), for delta above 1 + high."""
    for new, old, advantage in rows:
        rho = math.exp(new - old)
        expected = -min(min(rho, 1.5) * advantage, min(max(rho, 0.8), 1.28) * advantage)
        values = [torch.tensor([[x]], dtype=torch.float64) for x in (new - old, advantage, new, old)]
        assert Clip(0.2, 0.28, dual=1.5)(*values).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("ratio", "surrogate"), LEVELS)
def test_on_policy_all_ratios_have_one_gradient_under_one_aggregation(ratio, surrogate, aggregation):
    lengths, advantages = (4, 1, 2), (1.5, -0.5, 2.0)
    mask = torch.tensor([[t < n for t in range(4)] for n in lengths])
    generator = torch.Generator().manual_seed(0)
    new = (-3 * torch.rand(3, 4, dtype=torch.float64, generator=generator) * mask).requires_grad_()
    column = torch.tensor(advantages, dtype=torch.float64)[:, None]
    loss = SURROGATES[surrogate]()(RATIOS[ratio](new, new.detach(), mask), column, new, new.detach())
    total = aggregate(
        split_among_tokens(loss, mask),
        mask,
        {"name": "constant", "length": 8.0} if aggregation == "constant" else aggregation,
    )
    (gradient,) = torch.autograd.grad(total, new)
    for i, length in enumerate(lengths):
        divisor = {"sequence_sum": 3, "sequence_mean": 3 * length, "token_mean": 7, "constant": 3 * 8}[aggregation]
        for t in range(4):
            expected = -advantages[i] / divisor if t < length else 0.0
            assert gradient[i, t].item() == pytest.approx(expected, abs=1e-12)


def test_the_loss_of_a_sequence_is_one_value_and_token_advantages_make_it_one_of_each_token():
    new = torch.full((2, 3), -1.0)
    log_ratio, old = torch.zeros(2, 1), new.clone()
    assert Clip()(log_ratio, torch.ones(2, 1), new, old).shape == (2, 1)
    assert Clip()(log_ratio, torch.ones(2, 3), new, old).shape == (2, 3)
    assert VESPO()(log_ratio, torch.ones(2, 1), new, old).shape == (2, 3)  # its gradient is per token


@pytest.mark.parametrize("name", CASES)
def test_extreme_log_ratios_give_finite_values_and_gradients(name):
    surrogate, chosen = CASES[name]
    for advantage in (-1.0, 0.0, 1.0):
        log_ratio = torch.tensor([[-1000.0, -100.0, -30.0, 30.0, 88.8, 100.0, 1000.0]])
        new, old = log_ratio.clamp(max=0).requires_grad_(), (-log_ratio).clamp(max=0)
        loss = SURROGATES[surrogate](**chosen)(new - old, torch.full((1, 1), advantage), new, old)
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        assert loss.isfinite().all() and gradient.isfinite().all()
        if advantage == 0 and surrogate != "dro":  # its penalty is on all tokens
            assert (loss == 0).all() and (gradient == 0).all()


@pytest.mark.parametrize("log_ratio", [15.0, 21.0, 30.0, 80.0, 1000.0])
def test_a_bad_token_of_high_ratio_is_pushed_down_unless_the_dual_is_on(log_ratio):
    new, advantages = torch.tensor([[log_ratio]], requires_grad=True), torch.tensor([[-1.0]])
    loss = Clip()(new, advantages, new, new)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert gradient.item() > 1
    loss = Clip(dual=3.0)(new, advantages, new, new)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert loss.item() == pytest.approx(3.0) and gradient.item() == 0


@settings(deadline=None, max_examples=25)
@given(tokens)
@pytest.mark.parametrize("name", CASES)
def test_clipped_tokens_are_those_without_a_gradient(name, rows):
    surrogate, chosen = CASES[name]
    rows = [row for row in rows if not near_a_corner(*row, surrogate, chosen)] or [(-1.0, -1.1, 0.5)]
    rows = [(new, old, advantage if abs(advantage) > 1e-9 else 0.0) for new, old, advantage in rows]
    new, old, advantages = (x.clone()[None] for x in torch.tensor(rows, dtype=torch.float64).T)
    clipped = SURROGATES[surrogate](**chosen).clipped(new - old, advantages, new, old)
    soft = surrogate in ("sapo", "vespo", "dro", "shaping")  # their gradient only comes close to 0
    expected = [not soft and row[2] != 0 and slow(surrogate, *row, **chosen)[1] == 0 for row in rows]
    assert clipped.dtype == torch.bool and clipped[0].tolist() == expected


def test_a_ratio_that_underflows_on_the_side_of_no_bound_is_not_clipped():
    log_ratio, one = torch.tensor([[-120.0, 120.0]]), torch.ones(1, 2)
    assert Clip().clipped(log_ratio, one, log_ratio, log_ratio).tolist() == [[False, True]]
    assert Clip().clipped(log_ratio, -one, log_ratio, log_ratio).tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("name", "chosen", "message"),
    [
        ("clip", {"low": 0.0}, "Clip: low=0.0 must be a number above 0 and at most 1"),
        ("clip", {"low": 1.5}, "low=1.5"),
        ("clip", {"high": -1.0}, "high=-1.0"),
        ("clip", {"low": math.nan}, "low=nan"),
        ("clip", {"low": "0.2"}, "low='0.2'"),
        ("clip", {"low": True}, "low=True"),
        ("clip", {"dual": 1.0}, "dual=1.0"),
        ("cispo", {"high": 0.0}, "CISPO: high=0.0"),
        ("sapo", {"tau_positive": 0.0}, "tau_positive=0.0"),
        ("dppo", {"delta": 0.0}, "delta=0.0"),
        ("dppo", {"delta": 1.5}, "delta=1.5"),
        ("dppo", {"divergence": "js"}, "divergence='js' must be 'tv' or 'kl'"),
        ("gmpo", {"low": 0.0}, "GMPO: low=0.0"),
        ("dro", {"beta": 0.0}, "DRO: beta=0.0"),
        ("vespo", {"k_negative": -1.0}, "k_negative=-1.0"),
    ],
)
def test_fields_out_of_range_are_refused(name, chosen, message):
    with pytest.raises(ValueError, match=message):
        SURROGATES[name](**chosen)


ragged_batches = st.lists(st.lists(st.floats(-5, 5), max_size=5), min_size=1, max_size=6)
CONSTANT = 12.0
NAN = float("nan")


def padded(rows, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows) if width is None else width
    values = torch.zeros(len(rows), width, dtype=torch.float64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        mask[i, : len(row)] = True
    return values, mask


def slow_weight(mode: str, length: int, num_rows: float, num_tokens: float) -> float:
    """Return the weight of one token's loss."""
    return {
        "sequence_sum": 1 / num_rows,
        "sequence_mean": 1 / (num_rows * max(length, 1)),
        "token_mean": 1 / max(num_tokens, 1),
        "constant": 1 / (num_rows * CONSTANT),
    }[mode]


def chosen(mode: str):
    return {"name": mode, "length": CONSTANT} if mode == "constant" else mode


def ours(rows, mode, **counts) -> torch.Tensor:
    return aggregate(*padded(rows), chosen(mode), **counts)


@settings(deadline=None, max_examples=25)
@given(ragged_batches)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregation_and_its_gradient_equal_a_slow_loop(mode, rows):
    num_tokens = sum(map(len, rows))
    values, mask = padded(rows)
    values.requires_grad_()
    result = aggregate(values, mask, chosen(mode))
    weights = [slow_weight(mode, len(row), len(rows), num_tokens) for row in rows]
    expected = math.fsum(w * x for w, row in zip(weights, rows, strict=True) for x in row)
    assert result.shape == () and result.item() == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(result, values)
    for i, row in enumerate(rows):
        assert gradient[i, : len(row)].tolist() == pytest.approx([weights[i]] * len(row), abs=1e-15)
        assert not gradient[i, len(row) :].any()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregations_pass_gradcheck(mode):
    values, mask = padded([[1.0, 2.0, 3.0], [], [0.5]])
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: aggregate(x, mask, chosen(mode)), values)


@settings(deadline=None, max_examples=25)
@given(ragged_batches, st.data())
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_parts_in_any_order_add_up_to_the_whole(mode, rows, data):
    num_tokens = sum(map(len, rows))
    assume(num_tokens)
    shuffled = data.draw(st.permutations(rows))
    cut = data.draw(st.integers(0, len(rows)))
    counts = {"num_rows": len(rows), "num_tokens": num_tokens}
    parts = [ours(part, mode, **counts) for part in (shuffled[:cut], shuffled[cut:]) if part]
    assert sum(p.item() for p in parts) == pytest.approx(ours(rows, mode).item(), abs=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_values_are_never_read(mode):
    values = torch.tensor([[1.0, NAN], [math.inf, NAN]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, False]])
    result = aggregate(values, mask, chosen(mode))
    (gradient,) = torch.autograd.grad(result, values)
    assert result.isfinite() and gradient.isfinite().all() and (gradient[~mask] == 0).all()


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)], ids=str)
def test_nothing_to_sum_is_zero(mode, shape):
    values = torch.ones(shape, requires_grad=True)
    result = aggregate(values, torch.zeros(shape, dtype=torch.bool), chosen(mode))
    (gradient,) = torch.autograd.grad(result, values)
    assert result.item() == 0 and not gradient.any()


def test_a_function_aggregates_too():
    def largest(values, mask, num_rows, num_tokens):
        assert (num_rows, num_tokens) == (2, 3)
        return values[mask].max()

    values, mask = padded([[1.0, 5.0], [2.0]])
    assert aggregate(values, mask, largest).item() == 5.0
