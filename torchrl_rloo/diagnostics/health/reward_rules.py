"""Rules about rewards: signal, learning, hacking by length, format or an exploited reward model, lengths, failures."""

from __future__ import annotations

import statistics

from torchrl_rloo.diagnostics.health.conditions import above, below, both, compared, grown, growth, shrunk
from torchrl_rloo.diagnostics.health.history import WINDOW, History
from torchrl_rloo.diagnostics.health.rule import Evidence, Rule

_HELD_OUT = ("eval/sampled", "eval/greedy")  # sampled as in training, else greedy
_SIGNAL = "frac_reward_zero_std"


def reward_drop(history: History) -> Evidence | None:
    """Hold if the reward has lost half of what it had gained, by more than its noise.

    The highest of many medians is itself some deviations above a steady reward, so the limit is twice the usual three.
    """
    start, recent, best = history.start("reward"), history.recent("reward"), history.highest("reward")
    spread = history.recent("reward_std")
    if start is None or spread is None:
        return None
    gain, loss = best - start, best - recent
    if loss <= 0.5 * gain or loss <= 6 * noise(history):
        return None
    return {"reward": recent, "highest reward": best, "reward at the start": start}


def noise(history: History) -> float:
    """Return the standard deviation of the median reward of five steps, from the differences of successive steps."""
    values = history.window("reward")
    differences = [b - a for a, b in zip(values, values[1:], strict=False)]
    if not differences:
        return 0.0
    step = statistics.median(map(abs, differences)) / 0.954  # of a normal distribution: 0.6745 * sqrt(2)
    return step * 1.25 / 5**0.5  # the median's deviation is 1.25 times the mean's


def proxy_gap(history: History) -> Evidence | None:
    """Hold if the training reward has risen clearly while held-out scores have not risen at two evaluations."""
    start, recent, spread = history.start("reward"), history.recent("reward"), history.start("reward_std")
    name = next((name for name in _HELD_OUT if history.count(name)), None)
    if start is None or name is None or history.count(name) < 3:
        return None
    first, high = history.first(name), history.first(f"{name}_high")
    scores = history.window(name)[-2:]
    rise = recent - start
    if (
        high is None
        or rise <= max(0.5 * (spread or 0.0), 6 * noise(history))
        or max(scores) > first + 0.25 * (high - first)
    ):
        return None
    return compared("reward", start, recent) | {name: scores[-1], f"{name} at the start": first}


def held_out_drop(history: History) -> Evidence | None:
    """Hold if a held-out score is below its best by more than both confidence intervals."""
    for name in _HELD_OUT:
        low, now = history.window(f"{name}_low"), history.now(name)
        high = history.now(f"{name}_high")
        if now is not None and high is not None and low and high < max(low):
            return {name: now, f"{name}_high": high, f"best {name}_low": max(low)}
    return None


def length_hacking(history: History) -> Evidence | None:
    """Hold if completions are much longer than at the start, and the longer ones of a group earn more."""
    name, correlation = "completions/mean_length", "group/length_correlation"
    start, recent, found = history.start(name), history.recent(name), history.recent(correlation)
    if start is None or found is None or recent <= 1.5 * start or found <= 0.3:
        return None
    return compared(name, start, recent) | {correlation: found}


def exploited_reward(history: History) -> Evidence | None:
    """Hold if the mean reward is above every reward of the start: a scale that a bounded task reward cannot leave."""
    highest, recent = history.window("reward_max"), history.recent("reward")
    first, spread = history.start("reward_max"), history.start("reward_std")
    if first is None or recent is None or spread is None or recent <= first + 2 * spread:
        return None
    return {"reward": recent, "reward_max": highest[-1], "reward_max at the start": first}


def no_progress(history: History) -> Evidence | None:
    """Hold if the reward of the window is not above the start by more than its noise."""
    start, values = history.start("reward"), history.window("reward")
    if start is None or len(values) < WINDOW or history.count("reward") < 2 * WINDOW:
        return None
    mean, best = statistics.fmean(values), history.highest("reward")
    if mean > start + 3 * noise(history) or best > start + 6 * noise(history):
        return None
    return compared("reward", start, mean)


def task_without_signal(history: History) -> Evidence | None:
    """Hold if a task of a mixture has had no signal for ten steps, although it has a share of the rows."""
    found = {}
    for name in history.matching("tasks/*/frac_reward_zero_std"):
        share = history.recent(name.replace(_SIGNAL, "share"))
        recent = history.recent(name, 10)
        if share is not None and recent is not None and share >= 0.1 and recent > 0.95:
            found[name] = recent
    return found or None


def failed_evaluation(history: History) -> Evidence | None:
    """Hold if a scorer failed in the current evaluation."""
    failed = history.now("eval/failed")
    return {"eval/failed": failed} if failed else None


def failing_rewards(history: History) -> Evidence | None:
    """Hold if reward functions failed on more than 5 % of the rows of the latest ten steps."""
    kinds = ("raised", "malformed", "timed_out", "worker_died", "not_finite")
    names = [name for kind in kinds for name in history.matching(f"count/rewards/*/{kind}")]
    failed, rows = sum(growth(history, name) for name in names), growth(history, "count/advantage/rows")
    return {"failed scores": failed, "rows": rows} if rows > 0 and failed > 0.05 * rows else None


REWARD_RULES = (
    Rule(
        "too_hard",
        both(above(_SIGNAL, 0.9), below("outcome/solved/share", 0.05)),
        (_SIGNAL, "outcome/solved/share"),
        "Nine of ten groups have no training signal, and almost no completion is solved: nothing is learned.",
        "Read a prompt as the policy sees it (template, answer format); use easier prompts, partial scores, or a larger"
        " plan.num_generations.",
        "below 0.5 of the groups without signal",
        "https://arxiv.org/abs/2503.14476 (DAPO: dynamic sampling)",
        patience=5,
    ),
    Rule(
        "no_signal",
        both(above(_SIGNAL, 0.9), both(above("outcome/solved/share", 0.05), below("outcome/solved/share", 0.8))),
        (_SIGNAL, "outcome/solved/share"),
        "Nine of ten groups have equal rewards, although the prompts are neither solved nor too hard.",
        "Check that the reward depends on the completion; raise generate.temperature, and set curriculum.refill={}.",
        "below 0.5 of the groups without signal",
        "https://arxiv.org/abs/2503.14476 (DAPO: dynamic sampling)",
        patience=5,
    ),
    Rule(
        "solved",
        both(above(_SIGNAL, 0.9), above("outcome/solved/share", 0.8)),
        (_SIGNAL, "outcome/solved/share"),
        "Nine of ten groups have no training signal, because the prompts are solved.",
        "Stop here, use harder prompts, or set curriculum.refill={} or curriculum.pass_rate={}.",
        "the end of a successful run",
        "https://arxiv.org/abs/2503.14476 (DAPO: dynamic sampling)",
        "info",
        patience=5,
    ),
    Rule(
        "little_signal",
        above(_SIGNAL, 0.5, n=10),
        (_SIGNAL,),
        "More than half of the groups have equal rewards, so half of the samples teach nothing.",
        "Choose prompts by pass rate (curriculum.pass_rate={}) or raise plan.num_generations.",
        "below 0.5",
        "https://arxiv.org/abs/2503.14476 (DAPO: dynamic sampling)",
        "info",
        patience=10,
    ),
    Rule(
        "task_without_signal",
        task_without_signal,
        ("tasks/*/frac_reward_zero_std", "tasks/*/share"),
        "A task of the mixture has no training signal.",
        "Lower its weight (task.mixture), or give it easier or harder prompts.",
        "below 0.95 for each task",
        "https://arxiv.org/abs/2503.14476 (DAPO: dynamic sampling)",
        "info",
    ),
    Rule(
        "no_progress",
        no_progress,
        ("reward",),
        "The reward has not risen above its noise in at least 100 steps.",
        "Raise optimizer.lr, check that rewards differ within groups, and read completions.",
        "rises, with noise",
        "https://arxiv.org/abs/2402.14740 (RLOO)",
        "info",
    ),
    Rule(
        "reward_drop",
        reward_drop,
        ("reward", "reward_std"),
        "The reward has lost more than half of what it had gained.",
        "Go back to an earlier checkpoint with a lower optimizer.lr, kl.coeff=0.01 or fewer plan.epochs_per_batch.",
        "stays near its highest value",
        "https://arxiv.org/abs/2210.10760",
        patience=3,
    ),
    Rule(
        "proxy_gap",
        proxy_gap,
        ("eval/sampled", "eval/greedy", "eval/sampled_high", "eval/greedy_high", "reward", "reward_std"),
        "The training reward rises, but the held-out score does not: the policy learns something else than the task.",
        "Read high-reward completions, mend the reward, raise kl.coeff, and check that prompts of both sets are alike.",
        "both rise together",
        "https://arxiv.org/abs/2210.10760 (overoptimization of a proxy)",
        at=_HELD_OUT,
    ),
    Rule(
        "held_out_drop",
        held_out_drop,
        ("eval/sampled", "eval/greedy", "eval/*_low", "eval/*_high"),
        "The held-out score has fallen below its best, beyond both 95 % intervals.",
        "Keep the checkpoint of the best evaluation; raise kl.coeff, and look for what the reward pays for.",
        "does not fall significantly",
        "https://arxiv.org/abs/2210.10760 (overoptimization of a proxy)",
        at=_HELD_OUT,
    ),
    Rule(
        "exploited_reward",
        exploited_reward,
        ("reward", "reward_max", "reward_std"),
        "The mean reward is far above every reward of the first steps: the policy exploits a reward without a bound.",
        "Read the best completions; set reward.clip_range, raise kl.coeff, or use several reward models.",
        "within the range of the first rewards",
        "https://arxiv.org/abs/2312.09244 (ensembles against reward hacking)",
        patience=3,
    ),
    Rule(
        "length_hacking",
        length_hacking,
        ("completions/mean_length", "group/length_correlation"),
        "Completions are half as long again as at the start, and longer ones earn more: the reward may pay for length.",
        "Add an overlong penalty, judge truncated rows as wrong, or divide the reward by length.",
        "length grows slowly and levels off below the limit",
        "https://arxiv.org/abs/2310.03716 (length correlations in RLHF)",
        patience=3,
    ),
    Rule(
        "repetition",
        grown("diversity/repetition", 2.0, plus=0.2),
        ("diversity/repetition",),
        "Completions repeat themselves: the share of repeated runs of four tokens has grown by 0.2.",
        "Read completions; lower optimizer.lr, and do not reward length or repeated patterns.",
        "near its start",
        "https://arxiv.org/abs/1904.09751 (degenerate text)",
        patience=3,
    ),
    Rule(
        "truncation",
        above("completions/clipped_ratio", 0.7),
        ("completions/clipped_ratio",),
        "More than 70 % of the completions hit the token limit, so their answers are cut off.",
        "Raise generate.max_new_tokens, or add an overlong penalty.",
        "below 0.3",
        "https://arxiv.org/abs/2503.14476 (DAPO: overlong reward shaping)",
        patience=5,
    ),
    Rule(
        "some_truncation",
        above("completions/clipped_ratio", 0.3, n=10),
        ("completions/clipped_ratio",),
        "More than 30 % of the completions hit the token limit.",
        "Raise generate.max_new_tokens, or add an overlong penalty.",
        "below 0.3",
        "https://arxiv.org/abs/2503.14476 (DAPO: overlong reward shaping)",
        "info",
        patience=10,
    ),
    Rule(
        "short_completions",
        both(shrunk("completions/mean_length", 0.3), below("outcome/solved/share", 0.5)),
        ("completions/mean_length", "outcome/solved/share"),
        "Completions have shrunk to less than a third of their start, and most are wrong.",
        "Read completions: the policy may skip its reasoning. Check what the reward pays for short answers.",
        "steady, or grows with the reward",
        "https://arxiv.org/abs/2501.12948 (length grows with the reward)",
        patience=5,
    ),
    Rule(
        "abstentions",
        above("frac_abstained", 0.1),
        ("frac_abstained",),
        "More than 10 % of the rows have no reward: reward functions or conversations fail.",
        "Read quarantine.jsonl and stop/failed; mend the reward, its time limit or the environment.",
        "0, or rare",
        "the package's own rule: an abstaining row teaches nothing",
        patience=3,
    ),
    Rule(
        "failing_rewards",
        failing_rewards,
        ("count/advantage/rows", "count/rewards/*"),
        "Reward functions fail on more than 5 % of the rows.",
        "Read quarantine.jsonl; mend the function or raise reward.executor.timeout.",
        "0, or rare",
        "the package's own rule: a failed score abstains",
    ),
    Rule(
        "failed_evaluation",
        failed_evaluation,
        ("eval/failed",),
        "A scorer failed on held-out completions, which count as 0: the evaluation is too low.",
        "Read the log, mend the scorer, and evaluate the checkpoint again.",
        "0",
        "the package's own rule",
        recovery=1,
    ),
)
