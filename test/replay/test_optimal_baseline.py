"""The optimal token baseline against a loop over rows and tokens with whole distributions in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.embedded import build_model
from torchrl_rloo.modules import TransformersWrapper, record_log_probs
from torchrl_rloo.objectives import make_method
from torchrl_rloo.replay import MCAdvantage

LENGTHS = [3, 5, 2, 4, 4, 1]
REWARDS = [1.0, 0.0, 0.5, 0.3, 0.3, 0.3]  # the rewards of the second group are equal
TEMPERATURE = 0.7


def test_advantages_equal_a_loop_over_whole_distributions(tokenizer):
    model = build_model(tokenizer, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i, n in enumerate(LENGTHS):
        row = TensorDict({keys.GROUP_ID: torch.tensor(i // 3), keys.REWARD: torch.tensor([[REWARDS[i]]])})
        action = torch.arange(n + 2) >= 2
        row.set("tokens", Tokens(full=torch.randint(5, 200, (n + 2,), generator=generator)))
        row.set("masks", Masks(all_assistant_mask=action, all_attention_mask=torch.ones_like(action)))
        rows.append(row.set("log_probs", LogProbs(full=torch.zeros(n + 2))))
    rows = stack_rows(rows)
    for temperature, key in ((TEMPERATURE, keys.LOG_PROBS), (TEMPERATURE / 2, keys.SHARP_LOG_PROBS)):
        settings = {"generate": False, "generate_kwargs": {"temperature": temperature}}
        record_log_probs(TransformersWrapper(model, tokenizer=tokenizer, **settings), rows, log_probs=key)
    weights, double = [], copy.deepcopy(model).double()
    for row in rows.unbind(0):
        tokens, total, of_row = row[keys.TOKENS], 0.0, []
        with torch.no_grad():
            logits = double(input_ids=tokens[None], use_cache=False).logits[0, 1:-1]
        for probabilities, token in zip((logits / TEMPERATURE).softmax(-1), tokens[2:], strict=True):
            total += 1 - 2 * float(probabilities[token]) + float((probabilities**2).sum())
            of_row.append(total)
        weights.append(of_row)
    ours = MCAdvantage(3, credit="optimal_token").inv(rows)
    for i, n in enumerate(LENGTHS):
        members = range(i // 3 * 3, i // 3 * 3 + 3)
        for t in range(n):
            present = [j for j in members if t < LENGTHS[j]]
            baseline = sum(REWARDS[j] * weights[j][t] for j in present) / sum(weights[j][t] for j in present)
            assert ours[i][keys.ADVANTAGE][2 + t].item() == pytest.approx(REWARDS[i] - baseline, abs=2e-5)
        assert not ours[i][keys.ADVANTAGE][:2].any()
        if i > 2:
            assert not ours[i][keys.ADVANTAGE].any()  # exactly 0


def test_another_estimator_and_missing_scores_are_refused():
    with pytest.raises(ValueError, match="estimator='grpo' has no effect"):
        MCAdvantage(3, **make_method("grpo", advantage={"credit": "optimal_token"}).advantage)
    row = TensorDict({keys.GROUP_ID: torch.tensor(0), keys.REWARD: torch.zeros(1, 1), keys.LOG_PROBS: torch.zeros(2)})
    with pytest.raises(KeyError, match="half the temperature"):
        MCAdvantage(1 + 1, credit="optimal_token").inv(stack_rows([row]))
