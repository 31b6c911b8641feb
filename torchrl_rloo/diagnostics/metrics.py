"""Metrics of a batch of rows, each with one definition, beside the code that computes it.

Names are TRL's where TRL has one. Lengths count action tokens, the end of turn included. A metric is the same whatever
order, group layout or collector the rows came from. In the names of :data:`DEFINITIONS`, ``<a|b>`` is one of the
words, ``<word>`` any word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ActionTokens, action_tokens, gather_actions, ragged
from torchrl_rloo.data.stop_reasons import STOP_REASONS
from torchrl_rloo.functional import combine_rewards, k1, masked_mean, nanstd
from torchrl_rloo.functional.groups import group_ranges

DEFINITIONS = {
    "reward": "mean over the rows of the weighted sum of the reward functions, before clipping and any KL penalty; of "
    "the return, where the environment alone rewards",
    "reward_std": "unbiased standard deviation of the same over all rows of the batch",
    "frac_reward_zero_std": "share of the groups whose rewards (before KL) are all equal: they teach nothing",
    "frac_abstained": "share of the rows on which every reward function abstained: they train nothing",
    "rewards/<function>/<mean|std>": "of one reward function, over the rows on which it did not abstain",
    "rewards/<function>/abstained": "share of the rows on which it did; 0 in their sum if another one answered",
    "rewards/<chosen|rejected>": "mean score that a reward model gives the better (worse) completions of a step",
    "rewards/<chosen|rejected>_std": "unbiased standard deviation of the same",
    "rewards/margin": "mean difference of the two over the pairs",
    "rewards/accuracy": "share of the pairs whose better completion has the higher score; a tie counts half",
    "eval/pair_<accuracy|margin>": "the same as rewards/<accuracy|margin>, of the held-out pairs",
    "eval/pair_nll": "mean negative log-likelihood of the held-out pairs' labels in nats; 0.693 without knowledge",
    "eval/pair_ece": "expected calibration error of the held-out pairs at temperature 1, mean |accuracy - confidence|",
    "completions/<mean|min|max>_length": "action tokens a row",
    "completions/clipped_ratio": "share of the rows that a token, turn or time limit cut off",
    "completions/<mean|min|max>_terminated_length": "action tokens of the rows that were not cut off; 0 if none",
    "num_turns": "mean number of policy turns a row",
    "num_tool_calls": "mean number of tool calls a row",
    "stop/<reason>": "share of the rows that ended for one of the STOP_REASONS; one that no row has is not logged",
    "kl": "mean over action tokens of behaviour minus reference log-prob (k1), in nats",
    "staleness": "mean over the rows trained on of the current policy version minus the version that sampled the row",
    "tasks/<task>/share": "share of the rows that are of one task of a mixture",
    "tasks/<task>/<reward|frac_reward_zero_std|mean_length|clipped_ratio>": "as for all rows, of the task's rows",
    "logged/<name>": "mean over the calls of the step of what reward functions gave to log_metric",
    "eval/greedy": "mean score of the held-out prompts, answered with the most likely token at each step",
    "eval/sampled": "mean score of the held-out prompts, answered by sampling as in training",
    "eval/<greedy|sampled>_<low|high>": "ends of its 95 % confidence interval over the held-out prompts",
    "eval/failed": "scores of held-out completions that a scorer failed to give in this evaluation; they count 0",
    "eval/abstained": "held-out completions that a scorer had no opinion on in this evaluation; they count 0",
    "eval/<scorer>/greedy": "as eval/greedy, by a scorer other than the first",
    "eval/<scorer>/greedy_<low|high>": "ends of its 95 % confidence interval",
    "eval/<scorer>/<avg|pass|maj>@<k>": "mean score of the samples; expected best score of k samples; expected score "
    "of the answer that most of k samples give; with _low and _high the ends of the 95 % confidence interval",
    "eval/tasks/<task>/<metric>": "that metric over the held-out prompts of one task of a mixture",
    "eval/tasks/<task>/<scorer>/<metric>": "the same",
    "loss": "what is minimized, mean of the step's updates; near 0 on-policy at any progress: judge by the reward",
    "entropy": "mean of minus the sampler's log-prob over the action tokens of all rows, an unbiased estimate of the "
    "entropy of the sampled distribution, in nats",
    "entropy/with_signal": "mean entropy of the trainer's distribution per action token of the rows that the loss was "
    "given, without those of advantage 0 where they are dropped, in nats",
    "kl_coeff": "coefficient of the KL to the reference in the step",
    "kl_to_ref/with_signal": "mean of the loss's KL estimator per action token of the same rows, from current weights "
    "to reference",
    "loss_<kl_to_ref|kl_to_inference|entropy|router|centering|batch_sum>": "that term of the loss, weighted",
    "correction": "mean importance weight that corrects for the sampler, per action token trained on",
    "kept": "share of the action tokens trained on that a correction or mask leaves a policy gradient",
    "kl_approx": "mean k3 divergence of sampler from trainer per action token trained on, in nats; 0 on-policy",
    "ESS": "effective sample size of the importance ratios as a share of the rows trained on; 1 on-policy",
    "clip_ratio/region_mean": "share of all rows (or action tokens, if the ratio is theirs) that lose their gradient",
    "clip_ratio/<low|high>_mean": "the same, of negative and of positive advantage",
    "log_ratio_max": "largest difference of a trainer and a sampler log-prob of one token trained on, in nats",
    "parity/mean": "mean of |trainer - sampler| log-prob per action token before the first update, in nats",
    "parity/max": "the largest of them",
    "parity/k3": "mean k3 divergence from sampler to trainer per action token before the first update, in nats",
    "parity/ess": "effective sample size of whole rows' ratios of trainer to sampler, as a share of the rows",
    "parity/outside": "share of the action tokens whose ratio of trainer to sampler is outside [0.9, 1.1]",
    "grad_norm": "norm of the gradient before clipping",
    "learning_rate": "learning rate of the next optimizer step",
    "num_tokens": "tokens of all rows so far, prompts included",
    "count/<function>/<raised|malformed|timed_out|worker_died|not_finite>": "samples so far on which a reward function "
    "failed so; it abstains on them",
    "count/<function>/duplicates": "samples so far that took over the score of an identical one in their batch",
    "count/<function>/repeated": "samples so far that were scored alone because a call of several had failed",
    "count/<function>/<unnormalised|clipped>": "scores so far that shaping left as they were for want of statistics, "
    "or that it clipped",
    "count/shaped_truncated_rows": "truncated rows so far whose return was changed for it",
    "count/draws/<task>": "prompts so far that a mixture drew from a task",
    "count/zero_signal/<kept|all_wrong|all_right|flat|unanswered>": "groups so far that had a signal, or why they had "
    "none: all rewards 0, all 1, all equal, or fewer than two rows with one",
    "count/refill/<batches|groups|missing_groups|short_batches|stale_groups>": "batches so far collected to fill up "
    "steps, groups given out, groups that were not to be had and in how many steps, and surplus that got too old",
    "count/cache/<added|used|evicted|stale|worn|missing>": "groups so far that entered the cache, were given out, left "
    "it for newer ones, for their age or their use, or were asked for in vain",
    "count/pool/<target_draws|floor_draws|entered|retired>": "draws so far from the prompts preferred, and from all; "
    "prompts that came into the target range, and that are solved too well to be drawn",
    "count/rerolls/<queued|drawn|solved|given_up>": "prompts so far that nothing solved and that were queued, drawn "
    "again, solved then, or not in any of the tries",
    "pool/<standing>": "share of the prompts that are unseen, in_range, too_hard, too_easy or retired",
    "count/<groups|rows>": "that have left MCAdvantage with advantages so far",
    "count/expired_<groups|rows>": "that MCAdvantage gave up waiting for so far",
    "count/failed_turns": "turns so far whose reward function raised or gave no finite number; their rows abstain",
    "count/failed": "conversations so far that a transform (tools, feedback, a text environment) failed on and ended",
    "count/rewritten_turns": "turns so far at which the chat template would have shown another past than was seen",
    "count/<turn|token|time>_limit": "conversations so far that feedback would have gone on with beyond that limit",
    "count/tools/<tool>/<calls|failed|invalid|timed_out>": "calls so far of a tool, and of those that raised, whose "
    "arguments did not fit, and that took too long; each is told to the policy",
    "count/tools/<malformed|unknown|refused>": "calls so far that could not be read, of tools that there are not, and "
    "beyond a limit",
    "count/<failed_opens|failed_closes>": "sessions of a text environment so far that could not be opened, whose "
    "conversation ends as failed; and whose close failed",
    "count/collector/<failed_turns|timed_out|cancelled_groups>": "turns so far that the policy failed on, "
    "conversations that the limit of time cut while they waited, and groups that cancel() gave up",
    "count/asked_again": "answers so far that AddThinkingPrompt questioned",
    "count/<user_replies|user_ended|user_limit>": "replies so far of a simulated user, conversations that it ended, "
    "and those cut at its limit of replies",
    "count/top_k/<kept|left_out|expired_groups|expired_rows|late_rows>": "rows so far that a selection of each "
    "group kept and left out; the others as in MCAdvantage",
    "count/late_rows": "rows so far that came after their group had left MCAdvantage; they are dropped",
    "time/<phase>": "wall-clock seconds of a phase of the step, or of the whole step (in timings.jsonl)",
    "time/reward/<function>/<p50|p99|max>": "quantiles of the seconds that a reward function took for a sample, of all "
    "in this process so far (in timings.jsonl)",
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
        reward_names: names of the ``F`` reward functions; none where the environment alone rewards.
        reward_weights: their weights.
        mask_truncated_completions: leave the tokens of truncated rows out of ``kl``, as the loss does.
    """
    scores = rows[keys.RAW_REWARDS if keys.RAW_REWARDS in rows.keys(True) else keys.REWARDS]
    rewards = combine_rewards(scores, reward_weights) if reward_names else rows[keys.REWARD].reshape(len(rows))
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
        metrics[f"rewards/{name}/abstained"] = column.isnan().float().mean()
    actions = action_tokens(rows)
    truncated = rows[keys.TRUNCATED].reshape(-1)
    metrics |= _lengths(actions.mask.sum(1).float(), truncated)
    metrics["num_turns"] = rows[keys.NUM_TURNS].float().mean()
    if keys.NUM_TOOL_CALLS in rows.keys():
        metrics["num_tool_calls"] = rows[keys.NUM_TOOL_CALLS].float().mean()
    if keys.STOP_REASON in rows.keys(True):
        ends, names = Counter(rows[keys.STOP_REASON].tolist()), list(STOP_REASONS)
        metrics |= {f"stop/{names[i]}": torch.tensor(n / len(rows)) for i, n in sorted(ends.items())}
    if keys.LOG_PROBS in rows.keys(True):
        metrics["entropy"] = -masked_mean(gather_actions(ragged(rows, keys.LOG_PROBS), actions), actions.mask)
    if keys.REF_LOG_PROBS in rows.keys(True):
        mask = actions.mask & ~truncated[:, None] if mask_truncated_completions else actions.mask
        metrics["kl"] = masked_mean(_k1(rows, actions), mask)
    if keys.TASK in rows.keys():
        metrics |= _by_task(rows, rewards, actions.mask.sum(1).float(), truncated)
    return {name: float(value) for name, value in metrics.items()}


def _by_task(
    rows: TensorDictBase, rewards: torch.Tensor, lengths: torch.Tensor, truncated: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What the rows of each task of a mixture look like."""
    tasks = [row[keys.TASK] for row in rows.unbind(0)]
    metrics = {}
    for task in sorted(set(tasks)):
        mine = torch.tensor([other == task for other in tasks])
        metrics |= {
            f"tasks/{task}/share": mine.float().mean(),
            f"tasks/{task}/reward": rewards[mine].nanmean(),
            f"tasks/{task}/frac_reward_zero_std": _share_of_equal_groups(rewards[mine], rows[keys.GROUP_ID][mine]),
            f"tasks/{task}/mean_length": lengths[mine].mean(),
            f"tasks/{task}/clipped_ratio": truncated[mine].float().mean(),
        }
    return metrics


def _k1(rows: TensorDictBase, actions: ActionTokens) -> torch.Tensor:
    behaviour, ref = (gather_actions(ragged(rows, k), actions) for k in (keys.LOG_PROBS, keys.REF_LOG_PROBS))
    return k1(behaviour, ref)


def _share_of_equal_groups(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Groups of at least two rows that answered, all with one reward, over all groups."""
    low, high, answered = group_ranges(rewards, group_ids.unique(return_inverse=True)[1])
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
