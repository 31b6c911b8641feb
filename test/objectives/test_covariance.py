"""Clip-Cov and KL-Cov against a float64 loop of the paper's equations, whole and in micro-batches."""

from __future__ import annotations

import statistics

import pytest
import torch

from torchrl_rloo.data import keys
from torchrl_rloo.functional.covariance import COVARIANCES
from torchrl_rloo.objectives import RLOOLoss

SETTINGS = {"ratio": "token", "surrogate": "unclipped", "aggregation": "token_mean"}
RULES = [
    {"name": "kl", "share": 0.2, "coeff": 0.5},
    {"name": "kl", "share": 1e-6},  # one token at least
    {"name": "clip", "share": 0.2, "low": 0.1, "high": 2.0},
    {"name": "clip", "share": 0.2, "low": 90.0, "high": 91.0},  # none is inside
]


def plain_loss(log_probs: list[list[torch.Tensor]], rows, rule: dict) -> tuple[torch.Tensor, int]:
    """Compute the mean of the token losses, and how many tokens the rule chooses."""
    tokens = []
    for row, new in zip(rows.unbind(0), log_probs, strict=True):
        action, copies = row[keys.ACTION_MASK], int(row.get(keys.MULTIPLICITY, 1))
        advantages = row[keys.ADVANTAGE].expand(len(action), 1)[action, 0].tolist()
        tokens += list(zip(new, row[keys.LOG_PROBS][action].tolist(), advantages, strict=True)) * copies
    mean_log_prob = statistics.fmean(old for _, old, _ in tokens)
    mean_advantage = statistics.fmean(advantage for _, _, advantage in tokens)
    covariances = [(old - mean_log_prob) * (advantage - mean_advantage) for _, old, advantage in tokens]
    number = max(1, int(rule["share"] * len(tokens)))
    if rule["name"] == "kl":
        eligible = sorted(covariances, reverse=True)[:number]
        chosen = [c >= eligible[-1] for c in covariances]
    else:
        inside = [rule["low"] < c < rule["high"] for c in covariances]
        digits = [old * 1e7 % 1.0 if i else -1.0 for (_, old, _), i in zip(tokens, inside, strict=True)]
        bar = sorted(digits, reverse=True)[number - 1]
        chosen = [i and d >= bar for i, d in zip(inside, digits, strict=True)]
    total = 0.0
    for (new, old, advantage), taken in zip(tokens, chosen, strict=True):
        ratio = (new - old).exp()
        if taken and rule["name"] == "clip":
            continue
        penalty = rule.get("coeff", 1.0) * (new - old).abs() if taken else 0.0
        total = total - ratio * advantage + penalty
    return total / len(tokens), sum(chosen)


@pytest.mark.parametrize("entries", [(), ("token_advantages", "merged")], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_loss_and_gradient_equal_a_loop_and_do_not_depend_on_micro_batches(
    bigram, bigram_rows, rows_with, rule, entries
):
    rows = rows_with(bigram_rows, *entries)
    loss = RLOOLoss(bigram, covariance=rule, **SETTINGS)
    table, log_probs = bigram.table, []
    for row in rows.unbind(0):
        tokens, action = row[keys.TOKENS], row[keys.ACTION_MASK][1:]
        log_probs.append(bigram.distributions(tokens).gather(-1, tokens[1:, None])[:, 0][action].unbind(0))
    expected, number = plain_loss(log_probs, rows, rule)
    assert (number > 0) == (rule.get("low") != 90.0)
    (gradient,) = torch.autograd.grad(expected, table)
    out = loss(rows)
    torch.testing.assert_close(out.loss, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(out.loss, table)[0], gradient, rtol=1e-9, atol=1e-12)
    normalizers = loss.normalizers(rows)
    parts = sum(torch.autograd.grad(loss(part, normalizers).loss, table)[0] for part in (rows[:3], rows[3:]))
    torch.testing.assert_close(parts, gradient, rtol=1e-9, atol=1e-12)
    assert loss.needs_zero_advantage


def test_clip_cov_draws_its_tokens_evenly_and_always_the_same():
    log_probs = -torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 5
    rule = COVARIANCES["clip"](share=0.1, low=0.0, high=9.0)
    advantages = torch.where(torch.arange(20_000) % 2 == 0, 1.0, -1.0)
    limits = rule.limits(log_probs, advantages)
    chosen = rule.chosen(log_probs, advantages, limits)
    assert chosen.sum() == 2000
    covariance = (log_probs - log_probs.mean()) * (advantages - advantages.mean())
    assert (covariance[chosen] > 0).all()
    for side in (log_probs > log_probs.mean(), log_probs < log_probs.mean()):  # evenly among those inside
        share = chosen[side & (covariance > 0)].float().mean()
        assert share == pytest.approx(0.2, abs=0.02)


def test_settings_that_cannot_be_combined_are_refused(bigram):
    with pytest.raises(ValueError, match="chooses tokens and cannot be combined with ratio='sequence'"):
        RLOOLoss(bigram, covariance="kl")
    with pytest.raises(ValueError, match="covariance='cov' is unknown"):
        RLOOLoss(bigram, covariance="cov", **SETTINGS)
    with pytest.raises(ValueError, match="ClipCov: share=0"):
        RLOOLoss(bigram, covariance={"name": "clip", "share": 0}, **SETTINGS)
