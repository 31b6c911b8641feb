"""Metrics of a batch and of its parts, and their definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.metadata import TOKEN_STATISTICS, token_statistics, version_counts
from torchrl_rloo.data.stop_reasons import STOP_REASONS
from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.functional.statistics import distinct_share, group_ranges, nanstd, overlap
from torchrl_rloo.rewards.matching import extract_answer

# Parts of a batch


SOLVED = 1.0  # reward of a solved row, as in PassRatePool
_ROUNDING = 1e-6


class RowStatistics(NamedTuple):
    """Numbers about ``B`` rows that all metrics of a batch read."""

    rewards: torch.Tensor  # [B], NaN where a row abstains
    groups: torch.Tensor  # [B] int64, index of the row's group
    lengths: torch.Tensor  # [B] action tokens
    truncated: torch.Tensor  # [B] bool
    # Entries of token_statistics that all rows have: [B], or a list of B tensors if their sizes differ
    sums: Mapping[str, torch.Tensor | list[torch.Tensor]]


def row_statistics(rows: TensorDictBase, rewards: torch.Tensor) -> RowStatistics:
    """Return the numbers about finished rows ``[B]``, or about their metadata, and their rewards."""
    split = rows.unbind(0)
    if keys.ACTION_COUNT in rows.keys():
        found = [{name: row[name] for name in TOKEN_STATISTICS if name in row.keys()} for row in split]
    else:
        found = [token_statistics(row) for row in split]
    columns = {name: [each[name] for each in found] for name in TOKEN_STATISTICS if all(name in e for e in found)}
    sums = {name: col if name == keys.NGRAM_SKETCH else torch.stack(col) for name, col in columns.items()}
    groups = rows[keys.GROUP_ID].unique(return_inverse=True)[1]
    return RowStatistics(rewards, groups, sums[keys.ACTION_COUNT].float(), rows[keys.TRUNCATED].reshape(-1), sums)


def part_metrics(statistics: RowStatistics, part: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return share, mean length, truncation, entropy and KL of the rows under a mask; only the share of none."""
    metrics = {"share": part.float().mean()}
    if not part.any():
        return metrics
    lengths = statistics.lengths[part]
    metrics |= {"mean_length": lengths.mean(), "clipped_ratio": statistics.truncated[part].float().mean()}
    for name, key in (("entropy", keys.SURPRISAL), ("kl", keys.KL_TO_REF)):
        if key in statistics.sums:
            metrics[name] = statistics.sums[key][part].sum() / lengths.sum().clamp(min=1)
    return metrics


def outcome_metrics(statistics: RowStatistics) -> dict[str, torch.Tensor]:
    """Return the metrics of solved and of unsolved rows; rows that abstained are in neither part."""
    rewards = statistics.rewards
    parts = {"solved": rewards >= SOLVED - _ROUNDING, "unsolved": rewards < SOLVED - _ROUNDING}
    return {
        f"outcome/{outcome}/{name}": value
        for outcome, part in parts.items()
        for name, value in part_metrics(statistics, part).items()
    }


def named_metrics(statistics: RowStatistics, kind: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the metrics of each task of a mixture, or of each role."""
    metrics = {}
    for name in sorted(set(names)):
        mine = torch.tensor([other == name for other in names])
        found = part_metrics(statistics, mine) | {
            "reward": statistics.rewards[mine].nanmean(),
            "frac_reward_zero_std": share_of_equal_groups(statistics.rewards[mine], statistics.groups[mine]),
        }
        metrics |= {f"{kind}/{name}/{metric}": value for metric, value in found.items()}
    return metrics


def group_metrics(statistics: RowStatistics) -> dict[str, torch.Tensor]:
    """Return the spread of rewards and lengths within groups, and the correlation of the two.

    Groups with fewer than two scored rows are left out. The correlation is absent if one of the two never varies.
    """
    given = ~statistics.rewards.isnan()
    groups = statistics.groups[given]
    if not len(groups):
        return {}
    counts = torch.bincount(groups)

    def centered(values: torch.Tensor) -> torch.Tensor:
        values = values[given].double()
        return values - (torch.zeros(len(counts)).double().index_add_(0, groups, values) / counts.clamp(min=1))[groups]

    def mean_std(deviations: torch.Tensor) -> torch.Tensor:
        squares = torch.zeros(len(counts)).double().index_add_(0, groups, deviations.square())
        return (squares[counts > 1] / (counts[counts > 1] - 1)).sqrt().mean()

    if not (counts > 1).any():
        return {}
    rewards, lengths = centered(statistics.rewards), centered(statistics.lengths)
    metrics = {"group/reward_std": mean_std(rewards), "group/length_std": mean_std(lengths)}
    scale = (rewards.square().sum() * lengths.square().sum()).sqrt()
    if scale > _ROUNDING:
        metrics["group/length_correlation"] = (rewards * lengths).sum() / scale
    return metrics


def diversity_metrics(statistics: RowStatistics, answers: Sequence[str | None] | None) -> dict[str, float]:
    """Return how different completions and answers of a group are, and how much completions repeat themselves."""
    sums = statistics.sums
    metrics = {"diversity/repetition": float(sums[keys.REPETITION].float().mean())}
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(statistics.groups.tolist()):
        groups.setdefault(group, []).append(row)
    several = [members for members in groups.values() if len(members) > 1]
    if several:
        hashes, sketches = sums[keys.COMPLETION_HASH], sums[keys.NGRAM_SKETCH]
        measures = {
            "distinct": lambda members: distinct_share(hashes[members].tolist()),
            "ngram_overlap": lambda members: overlap([sketches[i] for i in members]),
        }
        if answers is not None:
            measures["distinct_answers"] = lambda members: distinct_share([answers[i] for i in members])
        for name, measure in measures.items():
            metrics[f"diversity/{name}"] = sum(map(measure, several)) / len(several)
    return metrics


def share_of_equal_groups(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the share of groups whose rows have equal rewards, two of them at least that are not NaN."""
    low, high, answered = group_ranges(rewards, groups.unique(return_inverse=True)[1])
    return ((answered > 1) & (low == high)).float().mean()


# Batches


DEFINITIONS = {
    "reward": "mean over the rows of the weighted sum of the reward functions, before clipping and any KL penalty; "
    "the mean return if only the environment gives rewards",
    "return": "mean of the returns that advantages compare: rewards after clips, shaping, rewards of turns and a KL; "
    "logged only if the return of a row differs from its reward",
    "reward_std": "unbiased standard deviation of that reward over all rows of the batch",
    "reward_max": "largest of these rewards",
    "frac_reward_zero_std": "share of the groups whose rewards (before KL) are all equal, so without training signal",
    "frac_abstained": "share of the rows without a return, so without training signal: every reward function "
    "abstained, or the trajectory failed",
    "rewards/<function>/<mean|std>": "mean or standard deviation of one reward function over the rows that it scored",
    "rewards/<function>/abstained": "share of the rows without a score of the function, as it abstained or the "
    "trajectory failed; it counts as 0 in the weighted sum if another function scored the row",
    "rewards/<chosen|rejected>": "mean score of the better (worse) completions of a step: of a reward model, or beta "
    "times the log-ratio to the reference (the log-prob without one), as in the objective",
    "rewards/<chosen|rejected>_std": "unbiased standard deviation of these scores",
    "rewards/margin": "mean difference of chosen and rejected score over the pairs",
    "rewards/accuracy": "share of the pairs whose better completion has the higher score; a tie counts half",
    "eval/pair_<accuracy|margin>": "rewards/<accuracy|margin> over the held-out pairs",
    "eval/pair_nll": "mean negative log-likelihood of the held-out pairs' labels in nats; 0.693 at chance",
    "log_probs/<chosen|rejected>": "mean log-prob of these completions in nats; ipo, orpo, simpo, dpo_norm: per token",
    "kl/reference_point": "KTO's estimate of the divergence from the reference in nats",
    "nll": "mean negative log-likelihood per learned token in nats",
    "eval/<loss|nll|kl>": "loss, nll or kl over the held-out rows",
    "eval/perplexity": "exp of eval/nll",
    "eval/pair_ece": "expected calibration error of the held-out pairs at temperature 1, mean |accuracy - confidence|",
    "completions/<mean|min|max>_length": "action tokens per row",
    "completions/clipped_ratio": "share of the rows that a token, turn or time limit truncated",
    "completions/<mean|min|max>_terminated_length": "action tokens per row that was not truncated; 0 if there is none",
    "num_turns": "mean number of policy turns per row",
    "num_tool_calls": "mean number of tool calls per row",
    "stop/<reason>": "share of the rows that ended for one of the STOP_REASONS; not logged for a reason without rows",
    "kl": "mean over action tokens of behavior minus reference log-prob (k1), in nats",
    "staleness": "mean over the rows trained on of the current policy version minus the version that sampled the row",
    "staleness/tokens_<updates>": "share of the action tokens trained on that are this many updates old; tokens "
    "beyond max_staleness leave the loss and do not count",
    "tasks/<task>/share": "share of the rows that belong to one task of a mixture",
    "tasks/<task>/<reward|frac_reward_zero_std|mean_length|clipped_ratio|entropy|kl>": "the metric over the rows of one"
    " task",
    "roles/<role>/share": "share of the rows that belong to one role of conversations of several",
    "roles/<role>/<reward|frac_reward_zero_std|mean_length|clipped_ratio|entropy|kl>": "the metric over the rows of one"
    " role; the reward is the mean return",
    "outcome/<solved|unsolved>/share": "share of the rows with a reward of at least 1 (solved), or below 1",
    "outcome/<solved|unsolved>/<entropy|kl|mean_length|clipped_ratio>": "the metric over these rows; not logged without"
    " such rows, and kl is over all their tokens",
    "group/<reward|length>_std": "unbiased standard deviation of reward or action tokens within a group, mean over the "
    "groups",
    "group/length_correlation": "correlation of reward and action tokens within groups, over all rows; not logged if "
    "one of the two never varies",
    "diversity/distinct": "share of the other completions of a group that differ from each other, by their tokens, mean"
    " over the groups: 0 if all are equal, 1 if none are",
    "diversity/distinct_answers": "share of the other completions of a group whose extracted answers differ from each "
    "other, mean over the groups; no answer counts as one; only where the task extracts answers, and not on a cluster",
    "diversity/ngram_overlap": "share of the runs of 4 tokens that completions of a group have in common, mean over the"
    " groups: 0 if none is in two completions, 1 if all have the same; estimated from up to 32 runs of each completion",
    "diversity/repetition": "share of the runs of 4 tokens of a completion that occurred earlier in it, mean over the "
    "rows",
    "logged/<name>": "mean over the step of the values that reward functions passed to log_metric",
    "eval/greedy": "mean score of the greedy completions of the held-out prompts",
    "eval/sampled": "mean score of completions of the held-out prompts, sampled as in training",
    "eval/<greedy|sampled>_<low|high>": "bounds of the 95 % confidence interval over the held-out prompts",
    "eval/<greedy|sampled>_length": "mean action tokens of these held-out completions",
    "eval/<greedy|sampled>_<min|max>_length": "action tokens of these held-out completions",
    "eval/<greedy|sampled>_<mean|min|max>_terminated_length": "action tokens of those that were not truncated; 0 if "
    "there is none",
    "eval/<greedy|sampled>_clipped_ratio": "share of these held-out completions that a limit truncated",
    "eval/sampled_entropy": "mean of minus the policy's log-prob over the tokens of the held-out samples, in nats",
    "eval/sampled_kl": "mean of policy minus reference log-prob (k1) over these tokens, in nats; only in a run of one "
    "process with a KL",
    "eval/sampled_<distinct|distinct_answers>": "share of the other samples of a prompt whose texts (extracted "
    "answers) differ from each other, mean over the held-out prompts: 0 if all are equal, 1 if none are",
    "eval/sampled_reward_std": "unbiased standard deviation of the scores of all samples, with several of each prompt",
    "eval/sampled_frac_reward_zero_std": "share of the held-out prompts whose samples all have the same score",
    "eval/sampled_ngram_overlap": "diversity/ngram_overlap of the samples of a held-out prompt, mean over the prompts",
    "eval/failed": "scores of held-out completions that a scorer failed to return in this evaluation; they count as 0",
    "eval/abstained": "scores of held-out completions that a scorer abstained from, or whose conversation failed, in "
    "this evaluation; they count as 0",
    "eval/<set>/<greedy|sampled>_<length|clipped_ratio>": "the metric over the prompts of a further set (eval.sets)",
    "eval/<set>/<greedy|sampled>_<min|max>_length": "the metric over the prompts of a further set",
    "eval/<set>/<greedy|sampled>_<mean|min|max>_terminated_length": "the metric over the prompts of a further set",
    "eval/<set>/sampled": "eval/sampled over the prompts of a further set",
    "eval/<set>/sampled_<low|high|entropy|kl|distinct|distinct_answers|ngram_overlap>": "the metric over the prompts "
    "of a further set",
    "eval/<set>/sampled_<reward_std|frac_reward_zero_std>": "the metric over the prompts of a further set",
    "eval/<set>/<failed|abstained>": "the metric over the prompts of a further set",
    "eval/<name>/greedy": "eval/greedy of the scorer, other than the first, or of the further set with this name",
    "eval/<name>/greedy_<low|high>": "bounds of its 95 % confidence interval",
    "eval/<scorer>/<avg|pass|maj>@<k>": "mean score of the samples (avg), expected best score of k samples (pass) or "
    "expected score of the majority answer of k samples (maj); _low and _high bound the 95 % confidence interval",
    "eval/<part>/<name>/<metric>": "the metric over the held-out prompts of one task of a mixture (eval/tasks/<task>), "
    "or of one scorer of a further set (eval/<set>/<scorer>)",
    "eval/<part>/<name>/<more>/<metric>": "the metric of one scorer over the held-out prompts of one task "
    "(eval/tasks/<task>/<scorer>), or over those of one task of a further set (eval/<set>/tasks/<task>)",
    "eval/<set>/tasks/<task>/<scorer>/<metric>": "the metric of one scorer over the prompts of one task of a further "
    "set",
    "loss": "minimized loss, mean over the updates of the step; near 0 on-policy, so judge progress by the reward",
    "entropy": "mean over the action tokens of all rows of minus the sampler's log-prob, an unbiased estimate of the "
    "entropy of the sampled distribution, in nats",
    "entropy/with_signal": "mean entropy of the trainer's distribution per action token of the rows passed to the "
    "loss, without rows of advantage 0 if they are dropped, in nats",
    "kl_coeff": "coefficient of the KL to the reference in the step",
    "entropy_coeff": "coefficient of the entropy bonus in the step, if it follows a target",
    "kl_to_ref/with_signal": "mean of the loss's estimator of KL(current weights || reference) per action token of the "
    "rows passed to the loss",
    "loss_<kl_to_ref|kl_to_inference|entropy|router|centering|batch_sum>": "weighted term of the loss",
    "correction": "mean importance weight that corrects for the sampler, per action token trained on",
    "kept": "share of the action tokens trained on that keep a policy gradient after corrections and masks",
    "kl_approx": "mean k3 divergence of sampler from trainer per action token trained on, in nats; 0 on-policy",
    "ESS": "effective sample size of the importance ratios as a share of the rows trained on; 1 on-policy",
    "clip_ratio/region_mean": "share of all rows, or of action tokens with token ratios, that lose their gradient",
    "clip_ratio/<low|high>_mean": "part of clip_ratio/region_mean with negative (positive) advantage",
    "clip_ratio/<low_min|high_max>": "smallest (largest) share of a row that counts in <low|high>_mean",
    "importance_ratio/<min|max>": "extremes of the ratio of trainer to sampler of one token trained on",
    "skipped_zero_adv_batches": "minibatches of the step without an advantage, which train nothing",
    "log_ratio_max": "largest difference of trainer and sampler log-prob of one token trained on, in nats",
    "parity/mean": "mean of |trainer - sampler| log-prob per action token before the first update, in nats",
    "parity/max": "largest |trainer - sampler| log-prob of an action token before the first update, in nats",
    "parity/k3": "mean k3 divergence from sampler to trainer per action token before the first update, in nats",
    "parity/ess": "effective sample size of the rows' ratios of trainer to sampler, as a share of the rows",
    "parity/outside": "share of the action tokens whose ratio of trainer to sampler is outside [0.9, 1.1]",
    "grad_norm": "norm of the gradient before clipping",
    "grad_norm/critic": "norm of the critic's gradient before clipping",
    "loss_distill": "weighted divergence of the student from its teacher, mean over the action tokens",
    "kl_to_teacher": "mean divergence of the student from its teacher over the vocabulary per action token, in nats",
    "loss_critic": "clipped squared error of the value head, mean over the action tokens",
    "explained_variance": "share of the variance of the value targets that the values explain, 1 at best",
    "value_clip_fraction": "share of the action tokens whose value moved by more than the clip",
    "learning_rate": "learning rate of the next optimizer step",
    "num_tokens": "tokens of all rows so far, including prompts",
    "count/rewards/<function>/<raised|malformed|timed_out|worker_died|not_finite>": "samples so far on which a reward "
    "function failed this way; it abstains on them",
    "count/rewards/<function>/duplicates": "samples so far that reused the score of an identical sample in their batch",
    "count/rewards/<function>/repeated": "samples so far that were scored separately because a call with several had "
    "failed",
    "count/shaping/<function>/<unnormalized|clipped>": "scores so far that shaping did not normalize for lack of "
    "statistics, or that it clipped",
    "count/draws/<task>": "prompts so far that a mixture drew from a task",
    "count/zero_signal/<kept|all_wrong|all_right|flat|unanswered>": "groups so far with a signal (kept), or by why "
    "they have none: all rewards 0, all 1, all equal, or fewer than two rows with a reward",
    "count/refill/<batches|groups|missing_groups|short_batches|stale_groups>": "batches so far that were collected to "
    "fill steps, groups returned, groups still missing and the steps that lacked them, and surplus groups dropped as "
    "stale",
    "count/stored/<groups|stale_groups>": "stored groups so far that were delivered in place of sampled ones, and that "
    "were dropped as stale",
    "count/cache/<added|used|evicted|stale|used_up|missing>": "groups so far that the cache added, returned, "
    "evicted for newer ones, dropped for age or for use, or lacked when requested",
    "count/pool/<target_draws|floor_draws|entered|retired>": "draws so far from preferred prompts and from all; "
    "prompts so far that entered the target range, and that were retired as solved",
    "count/rerolls/<queued|drawn|solved|given_up>": "unsolved prompts so far that were queued, drawn again, solved by "
    "a later try, or dropped after the last try",
    "pool/<unseen|in_range|too_hard|too_easy|retired>": "share of the prompts of this difficulty",
    "pool/<members|ready>": "number of engines in the pool, and of those that take requests",
    "pool/version_spread": "highest minus lowest policy version of the ready engines",
    "pool/<outstanding|waiting>": "prompt tokens and token limits of the requests inside engines, and number of "
    "requests that wait for a ready engine",
    "count/advantage/<groups|rows>": "groups or rows so far that left MCAdvantage with advantages",
    "count/advantage/expired_<groups|rows>": "incomplete groups, or their rows, that MCAdvantage dropped so far",
    "count/turn_reward/failed_turns": "turns so far whose reward function raised or returned no finite number; their "
    "rows abstain",
    "count/<tools|feedback|user|thinking|text_env>/failed": "conversations so far that ended because this transform "
    "failed; they abstain",
    "count/env/rewritten_turns": "turns so far at which the chat template rewrote earlier tokens of the conversation",
    "count/env/long_prompts": "prompts so far that left the policy no token; their rows abstain",
    "count/env/missing_images": "prompts so far whose image was missing; their rows abstain",
    "count/feedback/<turn|token|time>_limit": "conversations so far that this limit ended before further feedback",
    "count/tools/<tool>/<calls|failed|invalid|timed_out>": "calls so far of a tool, and those that raised, had invalid "
    "arguments or timed out; the policy sees each failure",
    "count/tools/<malformed|unknown|refused>": "tool calls so far that could not be parsed, named an unknown tool, or "
    "exceeded a limit",
    "count/text_env/<failed_opens|failed_closes>": "sessions of a text environment so far that failed to open, which "
    "ends the conversation as failed, or to close",
    "count/agent/<calls|refused_calls|failed_calls|cancelled_calls>": "calls of agents so far that were sampled, that "
    "exceeded a limit, on which the policy failed, and whose client left before the reply",
    "count/agent/<orphans|new_samples|rewritten>": "sampled replies so far that the agent did not receive, which are "
    "not trained on; calls that began a sample; calls before which the chat template rewrote earlier tokens",
    "count/agent/<failed|timed_out|failed_rewards>": "agents so far that failed, that reached max_seconds, and whose "
    "score raised; the first and the last abstain",
    "count/endpoint/<requests|retried|disconnected|unread_replies|ignored_sampling>": "requests so far; those that got "
    "the reply of an earlier one, or whose client left before it; replies that were sent and not read; requests whose "
    "sampling parameters the policy does not have",
    "count/endpoint/refused/<key|request|size|busy|host|path|http|slow|connections>": "requests or connections so far "
    "that were refused for this reason",
    "count/collector/<failed_turns|timed_out|replaced>": "turns so far on which the policy failed, conversations that "
    "the time limit ended while they waited, and failed conversations that others replaced",
    "count/collector/<cancelled_rows|cancelled_groups>": "conversations so far that were cut so that their group could "
    "be delivered, which abstain, and groups that cancel() dropped",
    "count/ledger/<drawn|requeued|acknowledged|late>": "groups so far that were drawn, re-queued under another "
    "attempt, and trained on; results so far of an earlier attempt, which were dropped",
    "count/staleness/<masked_tokens|masked_rows|requeued_groups>": "tokens so far beyond max_staleness that were taken "
    "out of the loss, their rows, and groups that were sampled again for them",
    "count/weights/failed_pushes": "weight updates so far that failed; sampling continued with the old weights",
    "count/pool/<deaths|suspected|restarts|failed_restarts|failed_fills|abandoned>": "engines so far that died or "
    "hung, did not answer or missed a push, were restarted, failed at a restart or a fill, and were left dead for good",
    "count/pool/<resubmitted|timeouts|late_answers>": "requests so far that were sent to another engine, that exceeded "
    "request_timeout, and answers that were dropped since another engine had the request",
    "count/thinking/asked_again": "completions so far to which AddThinkingPrompt added its prompt",
    "count/user/<replies|ended|limit>": "replies so far of a simulated user, conversations that it ended, "
    "and conversations ended by its limit of replies",
    "count/top_k/<kept|left_out|expired_groups|expired_rows|late_rows>": "rows so far that the selection within a "
    "group kept and left out; the others as in MCAdvantage",
    "count/advantage/late_rows": "rows so far that arrived after their group had left MCAdvantage; they are dropped",
    "time/<phase>": "wall-clock seconds of a phase of the step, or of the whole step (in timings.jsonl)",
    "time/collect/wait": "part of time/collect in which too few groups were finished (in timings.jsonl)",
    "time/engine/<mean|p90|max>": "seconds of a turn from its request to its answer, over the turns of the step (in "
    "timings.jsonl; as all quantiles, to 6 %)",
    "time/environment/<mean|p90|max>": "seconds of the environment's answer to a turn, with its tools, over the turns "
    "of the step (in timings.jsonl)",
    "time/tools/<mean|p90|max>": "seconds of all tool calls of a turn, over the turns of the step with any (in "
    "timings.jsonl)",
    "time/rewards/<mean|p90|max>": "seconds in which a group was scored or waited for it, over the groups of the step "
    "(in timings.jsonl)",
    "wait/worker/<engine|tools|environment|rewards|group|place>": "share of a worker's time that its conversations "
    "spent waiting for an engine, tools, the rest of the environment with resets, rewards, the other members of their "
    "group, or a place under max_in_flight. Each second is divided equally among the conversations. The shares and "
    "wait/worker/idle sum to 1; mean over the workers (in timings.jsonl)",
    "wait/worker/idle": "share of a worker's time without a conversation (in timings.jsonl)",
    "engine/<busy|busy_min>": "share of the time with a request in an engine, mean over the engines and the lowest of "
    "them (in timings.jsonl)",
    "engine/in_flight": "mean number of requests in an engine, over time and engines (in timings.jsonl)",
    "engine/<running|waiting>": "requests that the engines sampled, or that waited in them, at the end of the step (in "
    "timings.jsonl)",
    "engine/kv_usage": "largest share of an engine's key-value cache in use at the end of the step (in timings.jsonl)",
    "engine/preemptions": "running requests that the engines set back to waiting so far (in timings.jsonl)",
    "queue/finished_groups": "mean number of finished groups that waited for the trainer (in timings.jsonl)",
    "time/reward/<function>/<p50|p99|max>": "quantiles of a reward function's seconds per sample, over all samples of "
    "this process so far (in timings.jsonl)",
    "cpu_seconds": "CPU seconds of the run so far, including earlier processes (in timings.jsonl)",
    "tokens_per_second": "action tokens sampled in the step per second of collection (in timings.jsonl)",
    "trained_tokens_per_second": "tokens of the rows of a step per second of training (in timings.jsonl)",
}


def completion_metrics(
    rows: TensorDictBase,
    reward_names: Sequence[str],
    reward_weights: Sequence[float],
    *,
    mask_truncated_completions: bool = False,
    extract: Callable[[str], str | None] | None = None,
) -> dict[str, float]:
    """Compute the metrics of a batch of finished trajectories.

    Args:
        rows: finished trajectories, batch size ``[B]``, with whole groups; or their metadata.
        reward_names: names of the ``F`` reward functions; empty if only the environment gives rewards.
        reward_weights: ``F`` weights of the reward functions.
        mask_truncated_completions: leave the tokens of truncated rows out of ``kl``, as the loss does.
        extract: function from a completion's final text to its answer, or None if it has none, for
            ``diversity/distinct_answers``. None, or rows without text, leave the metric out.

    Returns:
        Values by name; :data:`DEFINITIONS` defines each.
    """
    # Rewards: of the batch, its groups and each reward function
    if reward_names:
        scores = rows[keys.RAW_REWARDS if keys.RAW_REWARDS in rows.keys(True) else keys.REWARDS]
        rewards, columns = combine_rewards(scores, reward_weights), scores.unbind(-1)
    else:
        rewards, columns = rows[keys.REWARD].reshape(len(rows)), ()
    given = rewards[~rewards.isnan()]
    metrics = {
        "reward": given.mean(),
        "reward_std": nanstd(rewards),
        "reward_max": given.max() if len(given) else torch.tensor(torch.nan),
        "frac_reward_zero_std": share_of_equal_groups(rewards, rows[keys.GROUP_ID]),
        "frac_abstained": rewards.isnan().float().mean(),
    }
    returns = rows[keys.REWARD].reshape(len(rows)) if keys.REWARD in rows.keys(True) else rewards
    if not torch.equal(returns.nan_to_num(), rewards.to(returns.dtype).nan_to_num()):
        metrics["return"] = returns.nanmean()
    for name, column in zip(reward_names, columns, strict=True):
        metrics[f"rewards/{name}/mean"] = column.nanmean()
        metrics[f"rewards/{name}/std"] = nanstd(column)
        metrics[f"rewards/{name}/abstained"] = column.isnan().float().mean()
    # Lengths and ends of the completions
    statistics = row_statistics(rows, rewards)
    lengths, truncated, sums = statistics.lengths, statistics.truncated, statistics.sums
    metrics |= length_metrics(lengths, truncated)
    metrics["num_turns"] = rows[keys.NUM_TURNS].float().mean()
    if keys.NUM_TOOL_CALLS in rows.keys():
        metrics["num_tool_calls"] = rows[keys.NUM_TOOL_CALLS].float().mean()
    if keys.STOP_REASON in rows.keys(True):
        ends, names = Counter(rows[keys.STOP_REASON].tolist()), list(STOP_REASONS)
        metrics |= {f"stop/{names[i]}": torch.tensor(n / len(rows)) for i, n in sorted(ends.items())}
    # Entropy and KL, if the rows have the log-probs
    if keys.SURPRISAL in sums:
        metrics["entropy"] = sums[keys.SURPRISAL].sum() / lengths.sum().clamp(min=1)
    if keys.KL_TO_REF in sums:
        counted = ~truncated if mask_truncated_completions else torch.ones_like(truncated)
        metrics["kl"] = sums[keys.KL_TO_REF][counted].sum() / lengths[counted].sum().clamp(min=1)
    # Parts of the batch
    answers = None
    if extract is not None and keys.COMPLETION in rows.keys():
        answers = [extract_answer(extract, row[keys.COMPLETION]) for row in rows.unbind(0)]
    metrics |= outcome_metrics(statistics) | group_metrics(statistics) | diversity_metrics(statistics, answers)
    if keys.TASK in rows.keys():
        metrics |= named_metrics(statistics, "tasks", [row[keys.TASK] for row in rows.unbind(0)])
    if keys.ROLE in rows.keys():
        returns = statistics._replace(rewards=rows[keys.REWARD].reshape(len(rows)))
        metrics |= named_metrics(returns, "roles", [row[keys.ROLE] for row in rows.unbind(0)])
    return {name: float(value) for name, value in metrics.items()}


def staleness_metrics(rows: TensorDictBase, version: int) -> dict[str, float]:
    """Compute the staleness of the rows that a step trains on, and the histogram of that of their tokens.

    Args:
        rows: ``[B]`` finished rows without tokens beyond the bound on staleness; or their metadata.
        version: policy version at the delivery.

    Returns:
        ``"staleness"``, and the shares ``"staleness/tokens_0"``, ``"staleness/tokens_1"`` ... up to the oldest token.
    """
    tokens: Counter[int] = Counter()
    for row in rows.unbind(0):
        for sampled_by, number in version_counts(row).tolist():
            tokens[version - sampled_by] += number
    total = tokens.total()
    shares = {f"staleness/tokens_{age}": tokens[age] / total for age in range(max(tokens) + 1)} if total else {}
    return {"staleness": version - float(rows[keys.POLICY_VERSION].float().mean())} | shares


def length_metrics(lengths: torch.Tensor, truncated: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return mean, minimum and maximum of lengths ``[N]``, also of those that no limit ended."""
    terminated = lengths[~truncated]
    metrics = {"completions/clipped_ratio": truncated.to(lengths.dtype).mean()}
    for suffix, part in (("length", lengths), ("terminated_length", terminated if len(terminated) else torch.zeros(1))):
        metrics |= {f"completions/{name}_{suffix}": getattr(part, name)() for name in ("mean", "min", "max")}
    return metrics
