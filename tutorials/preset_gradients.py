"""Gradients of all presets on one shared batch, side by side.

The batch has two prompts with two completions of up to three tokens. The log-probs of the sampler, the current policy
and the reference are given, so that ratios, clips and KL have an effect. The table shows minus the gradient with
respect to each token's log-prob, times 100, which a step would add. No model is needed: any module with ``score(rows)``
can replace one.
"""

from dataclasses import replace

import torch
from tensordict import TensorDict

from torchrl_rloo.data import keys, pad, stack_rows
from torchrl_rloo.data.rows import action_tokens
from torchrl_rloo.modules import ScoredActions
from torchrl_rloo.objectives import PRESETS, RLOOLoss, make_method
from torchrl_rloo.replay import MCAdvantage

LENGTHS = [3, 2, 3, 1]  # action tokens of each row, after one prompt token
REWARDS = [1.0, 0.0, 0.2, 0.6]  # rows 0 and 1 have one prompt, rows 2 and 3 another
LOG_PROBS = [[-1.0, -2.0, -0.5], [-0.1, -0.2], [-3.0, -1.0, -1.0], [-1.5]]  # of the current policy
FROM_SAMPLER = [[0.2, 0.3, -0.1], [0.1, -0.3], [-0.3, 0.1, 0.4], [0.3]]  # current policy minus sampler
FROM_REF = [[0.3, 0.1, 0.2], [0.0, 0.4], [-0.1, 0.2, 0.1], [0.5]]  # sampler minus reference


class GivenLogProbs(torch.nn.Module):
    """Policy whose parameters are the log-probs of the batch."""

    def __init__(self):
        super().__init__()
        self.log_probs = torch.nn.Parameter(pad([torch.tensor(p) for p in LOG_PROBS]))

    def score(self, rows) -> ScoredActions:
        actions = action_tokens(rows)
        log_probs = self.log_probs[[int(row["number"]) for row in rows.unbind(0)], : actions.mask.shape[1]]
        return ScoredActions(log_probs, torch.zeros_like(log_probs), actions)


def full_row(values: list[float]) -> torch.Tensor:
    """Put a 0 for the prompt token before the values of the action tokens."""
    return torch.tensor([0.0, *values])


def make_batch():
    rows = []
    for i, (current, from_sampler, from_ref) in enumerate(zip(LOG_PROBS, FROM_SAMPLER, FROM_REF, strict=True)):
        row = TensorDict({keys.GROUP_ID: torch.tensor(i // 2), keys.REWARD: torch.tensor([[REWARDS[i]]])})
        row["number"], row[keys.REWARDS] = torch.tensor(i), torch.tensor([REWARDS[i]])
        row[keys.ORIGIN] = torch.tensor([keys.SAMPLED, keys.GREEDY][i % 2])  # the baseline of ReMax
        row[keys.TOKENS] = torch.arange(1 + LENGTHS[i])
        row[keys.ACTION_MASK] = torch.arange(1 + LENGTHS[i]) > 0
        row[keys.LOG_PROBS] = full_row([p - s for p, s in zip(current, from_sampler, strict=True)])
        row[keys.REF_LOG_PROBS] = full_row([p - s - r for p, s, r in zip(current, from_sampler, from_ref, strict=True)])
        rows.append(row)
    return stack_rows(rows)


def step_of(name: str) -> torch.Tensor:
    """Return minus the gradient of a method's loss, ``[4, 3]``. PPO, which needs a critic, gets GRPO's advantages."""
    if PRESETS[name].critic:
        method = replace(make_method("grpo", num_generations=2), loss=PRESETS[name].loss)
    else:
        sizes = {"num_generations": 2, "prompts_per_step": 2, "max_new_tokens": 3, "reward_weights": [1.0]}
        advantage = {"estimator": {"k": 1, "success": 0.5}} if name == "pass_at_k" else {}  # two members can pass once
        method = make_method(name, kl="default", advantage=advantage, **sizes)
    # Subtract the KL from the rewards, as KLRewardTransform does in an environment
    rows = make_batch()
    if coeff := method.reward_kl_arguments["kl_to_ref_coeff"]:
        for row in rows.unbind(0):
            row[keys.REWARD] -= coeff * (row[keys.LOG_PROBS] - row[keys.REF_LOG_PROBS]).sum()
    rows = MCAdvantage(**method.advantage_arguments).inv(rows)
    policy = GivenLogProbs()
    RLOOLoss(policy, **method.loss_arguments)(rows).loss.backward()
    return -policy.log_probs.grad


def table() -> str:
    """Return the gradients as a Markdown table."""
    header = " | ".join(f"row {i} token {t}" for i, n in enumerate(LENGTHS) for t in range(n))
    lines = [f"| preset | {header} |", "| --- |" + " ---: |" * sum(LENGTHS)]
    for name in PRESETS:
        step = torch.round(step_of(name), decimals=4) + 0.0  # turns -0.0 into 0.0
        cells = [f"{100 * step[i, t]:.2f}" for i, n in enumerate(LENGTHS) for t in range(n)]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
