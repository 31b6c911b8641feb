"""What each published method does to one shared batch: the gradient of every preset, side by side.

Two prompts with two completions of up to three tokens. The sampler's, the present and the reference's log-probs are
given, so that ratios, clips and KL act; the table shows minus the gradient with respect to each token's log-prob, times
100: what a step would add. No model is needed: anything with ``score(rows)`` can stand in for one.
"""

from dataclasses import replace

import torch
from tensordict import TensorDict

from torchrl_rloo.data import keys, pad, stack_rows
from torchrl_rloo.data.rows import action_tokens
from torchrl_rloo.modules import ScoredActions
from torchrl_rloo.objectives import PRESETS, RLOOLoss, make_method
from torchrl_rloo.replay import MCAdvantage

LENGTHS = [3, 2, 3, 1]  # action tokens of each row; one prompt token before them
REWARDS = [1.0, 0.0, 0.2, 0.6]  # rows 0 and 1 are of one prompt, 2 and 3 of another
PRESENT = [[-1.0, -2.0, -0.5], [-0.1, -0.2], [-3.0, -1.0, -1.0], [-1.5]]
GAINED = [[0.2, 0.3, -0.1], [0.1, -0.3], [-0.3, 0.1, 0.4], [0.3]]  # since the sampler's weights
FROM_REF = [[0.3, 0.1, 0.2], [0.0, 0.4], [-0.1, 0.2, 0.1], [0.5]]  # from the reference


class GivenLogProbs(torch.nn.Module):
    """A policy that is nothing but the log-probs of the batch."""

    def __init__(self):
        super().__init__()
        self.log_probs = torch.nn.Parameter(pad([torch.tensor(p) for p in PRESENT]))

    def score(self, rows) -> ScoredActions:
        return ScoredActions(self.log_probs, torch.zeros_like(self.log_probs), action_tokens(rows))


def full(values: list[float]) -> torch.Tensor:
    """Per action token to per token: the prompt's token in front."""
    return torch.tensor([0.0, *values])


def batch():
    rows = []
    for i, (present, gained, moved) in enumerate(zip(PRESENT, GAINED, FROM_REF, strict=True)):
        row = TensorDict({keys.GROUP_ID: torch.tensor(i // 2), keys.REWARD: torch.tensor([[REWARDS[i]]])})
        row[keys.TOKENS] = torch.arange(1 + LENGTHS[i])
        row[keys.ACTION_MASK] = torch.arange(1 + LENGTHS[i]) > 0
        row[keys.LOG_PROBS] = full([p - g for p, g in zip(present, gained, strict=True)])
        row[keys.REF_LOG_PROBS] = full([p - g - m for p, g, m in zip(present, gained, moved, strict=True)])
        rows.append(row)
    return stack_rows(rows)


def step_of(name: str) -> torch.Tensor:
    """Return ``[4, 3]``: minus the gradient of a method's loss. PPO, which needs a critic, has GRPO's advantages."""
    if PRESETS[name].critic:
        method = replace(make_method("grpo", num_generations=2), loss=PRESETS[name].loss)
    else:
        method = make_method(name, kl="default", num_generations=2, prompts_per_step=2, max_new_tokens=3)
    rows = batch()
    if coeff := method.reward_kl_arguments["kl_to_ref_coeff"]:  # what KLRewardTransform does in an environment
        for row in rows.unbind(0):
            row[keys.REWARD] -= coeff * (row[keys.LOG_PROBS] - row[keys.REF_LOG_PROBS]).sum()
    rows = MCAdvantage(**method.advantage_arguments).inv(rows)
    policy = GivenLogProbs()
    RLOOLoss(policy, **method.loss_arguments)(rows).loss.backward()
    return -policy.log_probs.grad


def table() -> str:
    """The gradients as Markdown."""
    header = " | ".join(f"row {i} token {t}" for i, n in enumerate(LENGTHS) for t in range(n))
    lines = [f"| preset | {header} |", "| --- |" + " ---: |" * sum(LENGTHS)]
    for name in PRESETS:
        step = torch.round(step_of(name), decimals=4) + 0.0  # no negative zeros
        cells = [f"{100 * step[i, t]:.2f}" for i, n in enumerate(LENGTHS) for t in range(n)]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
