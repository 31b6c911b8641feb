"""Metrics of a batch of rows, each with one definition, beside the code that computes it.

Names are TRL's where TRL has one. Lengths count action tokens, the end of turn included. A metric is the same whatever
order, group layout or collector the rows came from. In the names of :data:`DEFINITIONS`, ``<a|b>`` is one of the
words, ``<word>`` any word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ActionTokens, action_tokens, gather_actions, ragged
from torchrl_rloo.functional import combine_rewards, k1, masked_mean, nanstd

DEFINITIONS = {
    "reward": "mean over the rows of the weighted sum of the reward functions, before clipping and any KL penalty",
    "reward_std": "unbiased standard deviation of the same over all rows of the batch",
    "frac_reward_zero_std": "share of the groups whose rewards (before KL) are all equal: they teach nothing",
    "frac_abstained": "share of the rows on which every reward function abstained: they train nothing",
    "rewards/<function>/<mean|std>": "of one reward function, over the rows on which it did not abstain",
    "completions/<mean|min|max>_length": "action tokens a row",
    "completions/clipped_ratio": "share of the rows that a token, turn or time limit cut off",
    "completions/<mean|min|max>_terminated_length": "action tokens of the rows that were not cut off; 0 if none",
    "num_turns": "mean number of policy turns a row",
    "kl": "mean over action tokens of behaviour minus reference log-prob (k1), in nats",
    "staleness": "mean over the rows of the current policy version minus the version that sampled the row",
    "eval/greedy": "mean score of the held-out prompts, answered with the most likely token at each step",
    "eval/sampled": "mean score of the held-out prompts, answered by sampling as in training",
    "loss": "what is minimised, mean of the step's updates; near 0 on-policy at any progress: judge by the reward",
    "entropy": "mean entropy of the sampled distribution per action token of the rows trained on, in nats",
    "kl_coeff": "coefficient of the KL to the reference in the step",
    "kl_to_ref": "mean of the loss's KL estimator per action token trained on, from current weights to reference",
    "loss_<kl_to_ref|kl_to_inference|entropy|router>": "that term of the loss, its coefficient included",
    "correction": "mean importance weight that corrects for the sampler, per action token trained on",
    "kept": "share of the action tokens trained on that a correction or mask leaves a policy gradient",
    "kl_approx": "mean k3 divergence of sampler from trainer per action token, in nats; 0 on-policy",
    "ESS": "effective sample size of the importance ratios as a share of the rows trained on; 1 on-policy",
    "clip_ratio/region_mean": "share of all rows (or action tokens, if the ratio is theirs) that lose their gradient",
    "clip_ratio/<low|high>_mean": "the same, of negative and of positive advantage",
    "log_ratio_max": "largest difference of a trainer and a sampler log-prob of one token, in nats",
    "parity/mean": "mean of |trainer - sampler| log-prob per action token before the first update, in nats",
    "parity/max": "the largest of them",
    "parity/k3": "mean k3 divergence from sampler to trainer per action token before the first update, in nats",
    "parity/ess": "effective sample size of whole rows' ratios of trainer to sampler, as a share of the rows",
    "parity/outside": "share of the action tokens whose ratio of trainer to sampler is outside [0.9, 1.1]",
    "grad_norm": "norm of the gradient before clipping",
    "learning_rate": "learning rate of the next optimizer step",
    "num_tokens": "tokens of all rows so far, prompts included",
    "count/<function>/not_finite": "scores of a reward function so far that were NaN or infinite; they abstain",
    "count/<function>/failed_calls": "calls of a reward function so far that raised for every row",
    "count/<function>/failed_rows": "rows so far for which a reward function raised; they abstain",
    "count/<groups|rows>": "that have left MCAdvantage with advantages so far",
    "count/expired_<groups|rows>": "that MCAdvantage gave up waiting for so far",
    "count/failed_turns": "turns so far whose reward function raised or gave no finite number; their rows abstain",
    "count/late_rows": "rows so far that came after their group had left MCAdvantage; they are dropped",
    "time/<phase>": "wall-clock seconds of a phase of the step, or of the whole step (in timings.jsonl)",
    "cpu_seconds": "CPU seconds of the run so far, earlier processes included (in timings.jsonl)",
    "tokens_per_second": "action tokens sampled in the step per second of collecting (in timings.jsonl)",
}


def completion_metrics(
    rows: TensorDictBase,
    reward_names: Sequence[str],
    reward_weights: Sequence[float],
    *,
    mask_truncated_completions: bool = False,
) -> dict[str, float]:
    """What a batch of finished trajectories looks like; names as in :data:`DEFINITIONS`.

    Args:
        rows: batch size ``[B]``, with whole groups.
        reward_names: names of the ``F`` reward functions.
        reward_weights: their weights.
        mask_truncated_completions: leave the tokens of truncated rows out of ``kl``, as the loss does.
    """
    scores = rows[keys.REWARDS]
    rewards = combine_rewards(scores, reward_weights)
    given = rewards[~rewards.isnan()]
    metrics = {
        "reward": given.mean(),
        "reward_std": nanstd(rewards),
        "frac_reward_zero_std": _share_of_equal_groups(rewards, rows[keys.GROUP_ID]),
        "frac_abstained": rewards.isnan().float().mean(),
    }
    for name, column in zip(reward_names, scores.unbind(-1), strict=True):
        metrics[f"rewards/{name}/mean"] = column.nanmean()
        metrics[f"rewards/{name}/std"] = nanstd(column)
    actions = action_tokens(rows)
    truncated = rows[keys.TRUNCATED].reshape(-1)
    metrics |= _lengths(actions.mask.sum(1).float(), truncated)
    metrics["num_turns"] = rows[keys.NUM_TURNS].float().mean()
    if keys.REF_LOG_PROBS in rows.keys(True):
        mask = actions.mask & ~truncated[:, None] if mask_truncated_completions else actions.mask
        metrics["kl"] = masked_mean(_k1(rows, actions), mask)
    return {name: float(value) for name, value in metrics.items()}


def _k1(rows: TensorDictBase, actions: ActionTokens) -> torch.Tensor:
    behaviour, ref = (gather_actions(ragged(rows, k), actions) for k in (keys.LOG_PROBS, keys.REF_LOG_PROBS))
    return k1(behaviour, ref)


def _share_of_equal_groups(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Groups of at least two rows that answered, all with one reward, over all groups."""
    _, index = group_ids.unique(return_inverse=True)
    n = int(index.max()) + 1
    answered = torch.zeros(n).index_add(0, index, (~rewards.isnan()).float())
    low = torch.full((n,), torch.inf).scatter_reduce(0, index, rewards.nan_to_num(torch.inf), "amin")
    high = torch.full((n,), -torch.inf).scatter_reduce(0, index, rewards.nan_to_num(-torch.inf), "amax")
    return ((answered > 1) & (low == high)).float().mean()


def _lengths(lengths: torch.Tensor, truncated: torch.Tensor) -> dict[str, torch.Tensor]:
    terminated = lengths[~truncated]
    if not len(terminated):
        terminated = torch.zeros(1)
    return {
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": truncated.float().mean(),
        "completions/mean_terminated_length": terminated.mean(),
        "completions/min_terminated_length": terminated.min(),
        "completions/max_terminated_length": terminated.max(),
    }
