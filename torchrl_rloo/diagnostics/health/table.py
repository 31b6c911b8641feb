"""Conditions of rules, and the table of all rules: what is wrong with a run, and what helps.

Limits are those of the named papers, or were chosen on runs of ``benchmarks/bench_health.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from torchrl_rloo.diagnostics.health.rule import RECENT, WINDOW, Condition, Evidence, History, Rule


def above(name: str, limit: float, n: int = RECENT) -> Condition:
    """Return the condition that the median of the latest ``n`` values is above a limit.

    Example:
        >>> history = History(["kl"])
        >>> for step in range(5):
        ...     history.append(step, {"kl": 3.0})
        >>> above("kl", 2.0)(history), below("kl", 2.0)(history)
        ({'kl': 3.0}, None)
    """
    return _recent(name, n, lambda recent: recent > limit)


def below(name: str, limit: float, n: int = RECENT) -> Condition:
    """Return the condition that the median of the latest ``n`` values is below a limit."""
    return _recent(name, n, lambda recent: recent < limit)


def grown(name: str, factor: float, plus: float = 0.0) -> Condition:
    """Return the condition that a metric is above ``factor`` times its start, and above its start by ``plus``."""
    return _moved(name, lambda start, recent: recent > factor * start and recent > start + plus)


def shrunk(name: str, factor: float) -> Condition:
    """Return the condition that a metric is below ``factor`` times its start."""
    return _moved(name, lambda start, recent: recent < factor * start)


def _recent(name: str, n: int, holds: Callable[[float], bool]) -> Condition:
    def condition(history: History) -> Evidence | None:
        recent = history.recent(name, n)
        return {name: recent} if recent is not None and holds(recent) else None

    return condition


def _moved(name: str, holds: Callable[[float, float], bool]) -> Condition:
    def condition(history: History) -> Evidence | None:
        start, recent = history.start(name), history.recent(name)
        return None if start is None or recent is None or not holds(start, recent) else compared(name, start, recent)

    return condition


def both(first: Condition, second: Condition) -> Condition:
    """Return the condition that two conditions hold, with the evidence of both."""

    def condition(history: History) -> Evidence | None:
        found = first(history)
        other = None if found is None else second(history)
        return None if other is None else {**found, **other}

    return condition


def not_finite(*names: str) -> Condition:
    """Return the condition that one of several metrics is NaN or infinite at the current step."""

    def condition(history: History) -> Evidence | None:
        values = {name: history.now(name) for name in names}
        return {name: v for name, v in values.items() if v is not None and not math.isfinite(v)} or None

    return condition


def counted(patterns: Sequence[str], limit: float, per: str, n: int = 10) -> Condition:
    """Return the condition that counters grew by more than a share of others over the latest ``n`` steps."""

    def condition(history: History) -> Evidence | None:
        total = sum(growth(history, name, n) for name in history.matching(per))
        failed = sum(growth(history, name, n) for pattern in patterns for name in history.matching(pattern))
        return {"failed": failed, per: total} if total > 0 and failed > limit * total else None

    return condition


def growth(history: History, name: str, n: int = 10) -> float:
    """Return by how much a counter grew over the latest ``n`` steps; one that is new began at 0."""
    values = history.window(name, n + 1)
    if not values:
        return 0.0
    return values[-1] - (values[0] if history.count(name) > len(values) or len(values) > n else 0.0)


def compared(name: str, start: float, recent: float) -> Evidence:
    """Return the evidence of a metric that departed from its start."""
    return {name: recent, f"{name} at the start": start}


# Policy


_UPDATE = ("loss", "grad_norm", "entropy", "kl", "kl_approx")
_UNSOLVED = above("outcome/unsolved/share", 0.25)  # exploration matters: a solved prompt needs none
_SPIKE = 10.0  # gradient norm over the median of the window


def gradient_spikes(history: History) -> Evidence | None:
    """Hold if three of the latest 20 gradient norms are ten times the median."""
    norms = history.window("grad_norm")
    if len(norms) < 20:
        return None
    limit = _SPIKE * statistics.median(norms)
    spikes = [norm for norm in norms[-20:] if norm > limit > 0]
    return {"grad_norm": max(spikes), "spikes": len(spikes), "limit": limit} if len(spikes) >= 3 else None


def sampler_not_updated(history: History) -> Evidence | None:
    """Hold if the sampler stays exactly the reference although gradients are taken."""
    window = history.window("kl", 20)
    norm = history.recent("grad_norm")
    if len(window) < 20 or norm is None or norm == 0 or any(abs(value) > 1e-7 for value in window):
        return None
    return {"kl": window[-1], "grad_norm": norm}


def value_divergence(history: History) -> Evidence | None:
    """Hold if the values are worse than a constant: for 20 steps, or lately with a loss that has tripled."""
    name, loss = "explained_variance", grown("loss_critic", 3.0)(history)
    recent, long = history.recent(name), history.recent(name, 20)
    if recent is None or recent >= 0 or (loss is None and (long is None or long >= 0)):
        return None
    return {name: recent} | dict(loss or {})


# Rewards


_HELD_OUT = ("eval/sampled", "eval/greedy")  # sampled as in training, else greedy
_SIGNAL = "frac_reward_zero_std"
_FAILED_SCORES = [
    f"count/rewards/*/{kind}" for kind in ("raised", "malformed", "timed_out", "worker_died", "not_finite")
]


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
    return step * 1.25 / 5**0.5


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


# System


def missing_engines(history: History) -> Evidence | None:
    """Hold if engines of the pool are not ready."""
    ready, members = history.now("pool/ready"), history.now("pool/members")
    return {"pool/ready": ready, "pool/members": members} if None not in (ready, members) and ready < members else None


def failed_pushes(history: History) -> Evidence | None:
    """Hold if a weight update failed in the latest five steps."""
    failed = growth(history, "count/weights/failed_pushes", 5)
    return {"failed pushes in 5 steps": failed} if failed > 0 else None


# Table


RULES: tuple[Rule, ...] = (
    # Policy
    Rule(
        "nan",
        not_finite(*_UPDATE),
        _UPDATE,
        "A metric of the update is not finite, so the weights are about to be lost.",
        "Lower optimizer.lr, set train.max_grad_norm=1, compute in float32, and look for infinite rewards.",
        "stop",
        at=_UPDATE,
    ),
    Rule(
        "entropy_collapse",  # arxiv.org/abs/2505.22617 (entropy mechanism), arxiv.org/abs/2503.14476 (clip-higher)
        both(shrunk("outcome/unsolved/entropy", 0.1), _UNSOLVED),
        ("outcome/unsolved/entropy", "outcome/unsolved/share"),
        "The policy no longer explores prompts that it has not solved: their entropy is below a tenth of its start.",
        "Raise the upper clip (loss.surrogate.high=0.28), set kl.coeff=0.01, or lower optimizer.lr.",
        patience=3,
    ),
    Rule(
        "mode_collapse",  # arxiv.org/abs/2503.14476 (DAPO, section 3.1)
        both(_moved("diversity/distinct", lambda start, recent: recent < min(0.1, 0.5 * start)), _UNSOLVED),
        ("diversity/distinct", "outcome/unsolved/share"),
        "The completions of a prompt are nearly all the same, although most of them are wrong.",
        "Lower optimizer.lr, set kl.coeff=0.01, or raise generate.temperature and plan.num_generations.",
        patience=3,
    ),
    Rule(
        "entropy_growth",  # arxiv.org/abs/2402.14740
        grown("entropy", 2.0, plus=0.3),
        ("entropy",),
        "The entropy has doubled: completions turn into noise, or the reward pays for it.",
        "Read completions of this step; lower optimizer.lr, set kl.coeff=0.01, and reward the whole completion.",
        patience=3,
    ),
    Rule(
        "kl_high",  # arxiv.org/abs/2210.10760 (reward falls again as the KL grows)
        above("kl", 2.0),
        ("kl",),
        "The policy has left the reference model: above 2 nats per token, rewards say little about it.",
        "Raise kl.coeff, set kl.target to hold a value, or lower optimizer.lr.",
        patience=5,
    ),
    Rule(
        "kl_runaway",  # arxiv.org/abs/2210.10760
        above("kl", 2.0),
        ("kl",),
        "The KL to the reference has been above 2 nats per token for 20 steps.",
        "Stop, and go back to a checkpoint from before with a smaller optimizer.lr or a larger kl.coeff.",
        "stop",
        patience=20,
    ),
    Rule(
        "clip_share",  # arxiv.org/abs/1707.06347 (PPO)
        above("clip_ratio/region_mean", 0.3),
        ("clip_ratio/region_mean",),
        "More than 30 % of the rows or tokens lose their gradient to the clip: updates are too large.",
        "Lower optimizer.lr, plan.epochs_per_batch or plan.minibatches.",
        patience=5,
    ),
    Rule(
        "gradient_spikes",  # arxiv.org/abs/1211.5063 (clipping of exploding gradients)
        gradient_spikes,
        ("grad_norm",),
        "The gradient norm spikes again and again to ten times its median.",
        "Set train.max_grad_norm=1 and reward.clip_range, and look for single rows with huge rewards or ratios.",
    ),
    Rule(
        "sampler_gap",  # joschu.net/blog/kl-approx.html (k3), fengyao.notion.site/off-policy-rl (sampler mismatch)
        above("kl_approx", 0.1),
        ("kl_approx",),
        "Sampler and trainer have drifted apart: 0.1 nats per token in the rows trained on.",
        "Set sampler.sync_every=1, lower collector.max_staleness, or set loss.correction=tis.",
        patience=3,
    ),
    Rule(
        "parity",  # arxiv.org/abs/2506.13585 (MiniMax-M1: mismatch of training and inference)
        above("parity/mean", 0.1, n=3),
        ("parity/mean",),
        "Sampler and trainer disagree on the same tokens: wrong weights, types or sampling settings in the sampler.",
        "Run the self-test of the engine, use equal dtypes, and check that weight updates arrive.",
    ),
    Rule(
        "effective_sample_size",  # doi.org/10.1080/01621459.1998.10473765 (Liu and Chen 1998: resample below half)
        below("ESS", 0.5),
        ("ESS",),
        "The importance weights leave less than half of the rows effective: updates are noise.",
        "Lower sampler.sync_every or collector.max_staleness, use fewer epochs, or set loss.correction=tis.",
        patience=3,
    ),
    Rule(
        "log_ratio",  # arxiv.org/abs/2510.18855 (IcePop)
        above("log_ratio_max", math.log(1000)),
        ("log_ratio_max",),
        "Single tokens are a thousand times more likely to trainer or sampler than to the other.",
        "Sync more often, lower optimizer.lr, or mask such tokens: loss.correction=icepop.",
        patience=5,
    ),
    Rule(
        "few_tokens_kept",  # arxiv.org/abs/2510.18855 (IcePop masks about 1 to 2 of 1,000 tokens)
        below("kept", 0.5),
        ("kept",),
        "Corrections and masks take the gradient from more than half of the tokens.",
        "Sync more often, or widen the bounds of loss.correction.",
        patience=5,
    ),
    Rule(
        "sampler_not_updated",
        sampler_not_updated,
        ("kl", "grad_norm"),
        "The sampler has been exactly the reference model for 20 steps, although gradients are taken.",
        "Set sampler.sync_every=1; in your own loop, call update_policy_weights_() after each step.",
    ),
    Rule(
        "value_divergence",  # arxiv.org/abs/2009.01325 (value function initialized from the reward model)
        value_divergence,
        ("explained_variance", "loss_critic"),
        "The value function explains the returns worse than their mean: it diverges, or learns nothing.",
        "Lower the critic's learning rate and bound its gradient norm, train it alone for some steps first, or use an "
        "algorithm without a critic.",
        patience=5,
    ),
    # Reward
    Rule(
        "too_hard",  # arxiv.org/abs/2503.14476 (DAPO: dynamic sampling)
        both(above(_SIGNAL, 0.9), below("outcome/solved/share", 0.05)),
        (_SIGNAL, "outcome/solved/share"),
        "Nine of ten groups have no training signal, and almost no completion is solved: nothing is learned.",
        "Read a prompt as the policy sees it (template, answer format); use easier prompts, partial scores, or a larger"
        " plan.num_generations.",
        patience=5,
    ),
    Rule(
        "no_signal",  # arxiv.org/abs/2503.14476 (DAPO: dynamic sampling)
        both(above(_SIGNAL, 0.9), both(above("outcome/solved/share", 0.05), below("outcome/solved/share", 0.8))),
        (_SIGNAL, "outcome/solved/share"),
        "Nine of ten groups have equal rewards, although the prompts are neither solved nor too hard.",
        "Check that the reward depends on the completion; raise generate.temperature, and set curriculum.refill={}.",
        patience=5,
    ),
    Rule(
        "solved",  # arxiv.org/abs/2503.14476 (DAPO: dynamic sampling)
        both(above(_SIGNAL, 0.9), above("outcome/solved/share", 0.8)),
        (_SIGNAL, "outcome/solved/share"),
        "Nine of ten groups have no training signal, because the prompts are solved.",
        "Stop here, use harder prompts, or set curriculum.refill={} or curriculum.pass_rate={}.",
        "info",
        patience=5,
    ),
    Rule(
        "little_signal",  # arxiv.org/abs/2503.14476 (DAPO: dynamic sampling)
        above(_SIGNAL, 0.5, n=10),
        (_SIGNAL,),
        "More than half of the groups have equal rewards, so half of the samples teach nothing.",
        "Choose prompts by pass rate (curriculum.pass_rate={}) or raise plan.num_generations.",
        "info",
        patience=10,
    ),
    Rule(
        "task_without_signal",  # arxiv.org/abs/2503.14476 (DAPO: dynamic sampling)
        task_without_signal,
        ("tasks/*/frac_reward_zero_std", "tasks/*/share"),
        "A task of the mixture has no training signal.",
        "Lower its weight (task.mixture), or give it easier or harder prompts.",
        "info",
    ),
    Rule(
        "no_progress",  # arxiv.org/abs/2402.14740 (RLOO)
        no_progress,
        ("reward",),
        "The reward has not risen above its noise in at least 100 steps.",
        "Raise optimizer.lr, check that rewards differ within groups, and read completions.",
        "info",
    ),
    Rule(
        "reward_drop",  # arxiv.org/abs/2210.10760
        reward_drop,
        ("reward", "reward_std"),
        "The reward has lost more than half of what it had gained.",
        "Go back to an earlier checkpoint with a lower optimizer.lr, kl.coeff=0.01 or fewer plan.epochs_per_batch.",
        patience=3,
    ),
    Rule(
        "proxy_gap",  # arxiv.org/abs/2210.10760 (overoptimization of a proxy)
        proxy_gap,
        ("eval/sampled", "eval/greedy", "eval/sampled_high", "eval/greedy_high", "reward", "reward_std"),
        "The training reward rises, but the held-out score does not: the policy learns something else than the task.",
        "Read high-reward completions, mend the reward, raise kl.coeff, and check that prompts of both sets are alike.",
        at=_HELD_OUT,
    ),
    Rule(
        "held_out_drop",  # arxiv.org/abs/2210.10760 (overoptimization of a proxy)
        held_out_drop,
        ("eval/sampled", "eval/greedy", "eval/*_low", "eval/*_high"),
        "The held-out score has fallen below its best, beyond both 95 % intervals.",
        "Keep the checkpoint of the best evaluation; raise kl.coeff, and look for what the reward pays for.",
        at=_HELD_OUT,
    ),
    Rule(
        "exploited_reward",  # arxiv.org/abs/2312.09244 (ensembles against reward hacking)
        exploited_reward,
        ("reward", "reward_max", "reward_std"),
        "The mean reward is far above every reward of the first steps: the policy exploits a reward without a bound.",
        "Read the best completions; set reward.clip_range, raise kl.coeff, or use several reward models.",
        patience=3,
    ),
    Rule(
        "length_hacking",  # arxiv.org/abs/2310.03716 (length correlations in RLHF)
        both(grown("completions/mean_length", 1.5), above("group/length_correlation", 0.3)),
        ("completions/mean_length", "group/length_correlation"),
        "Completions are half as long again as at the start, and longer ones earn more: the reward may pay for length.",
        "Add an overlong penalty, judge truncated rows as wrong, or divide the reward by length.",
        patience=3,
    ),
    Rule(
        "repetition",  # arxiv.org/abs/1904.09751 (degenerate text)
        grown("diversity/repetition", 2.0, plus=0.2),
        ("diversity/repetition",),
        "Completions repeat themselves: the share of repeated runs of four tokens has grown by 0.2.",
        "Read completions; lower optimizer.lr, and do not reward length or repeated patterns.",
        patience=3,
    ),
    Rule(
        "truncation",  # arxiv.org/abs/2503.14476 (DAPO: overlong reward shaping)
        above("completions/clipped_ratio", 0.7),
        ("completions/clipped_ratio",),
        "More than 70 % of the completions hit the token limit, so their answers are cut off.",
        "Raise generate.max_new_tokens, or add an overlong penalty.",
        patience=5,
    ),
    Rule(
        "short_completions",  # arxiv.org/abs/2501.12948 (length grows with the reward)
        both(shrunk("completions/mean_length", 0.3), below("outcome/solved/share", 0.5)),
        ("completions/mean_length", "outcome/solved/share"),
        "Completions have shrunk to less than a third of their start, and most are wrong.",
        "Read completions: the policy may skip its reasoning. Check what the reward pays for short answers.",
        patience=5,
    ),
    Rule(
        "abstentions",
        above("frac_abstained", 0.1),
        ("frac_abstained",),
        "More than 10 % of the rows have no reward: reward functions or conversations fail.",
        "Read quarantine.jsonl and stop/failed; mend the reward, its time limit or the environment.",
        patience=3,
    ),
    Rule(
        "failing_rewards",
        counted(_FAILED_SCORES, 0.05, "count/advantage/rows"),
        ("count/advantage/rows", "count/rewards/*"),
        "Reward functions fail on more than 5 % of the rows.",
        "Read quarantine.jsonl; mend the function or raise reward.executor.timeout.",
    ),
    Rule(
        "failed_evaluation",
        failed_evaluation,
        ("eval/failed",),
        "A scorer failed on held-out completions, which count as 0: the evaluation is too low.",
        "Read the log, mend the scorer, and evaluate the checkpoint again.",
        recovery=1,
    ),
    # System
    Rule(
        "staleness",  # arxiv.org/abs/2505.24298 (AReaL: quality falls beyond a staleness of 4 to 8)
        above("staleness", 8.0),
        ("staleness",),
        "Rows are more than eight policy versions old.",
        "Lower collector.max_staleness, or add engines.",
        patience=3,
    ),
    Rule(
        "failed_pushes",
        failed_pushes,
        ("count/weights/failed_pushes",),
        "Weight updates fail, so sampling continues with old weights.",
        "Read the log of the engine; three failures in a row stop the run.",
    ),
    Rule(
        "missing_engines",
        missing_engines,
        ("pool/ready", "pool/members"),
        "Engines of the pool are not ready.",
        "Read count/pool/deaths and the log; the supervisor restarts them, up to its limit.",
        patience=5,
    ),
    Rule(
        "tool_failures",  # arxiv.org/abs/2504.11536 (ReTool: failed calls fall in training)
        counted(["count/tools/*/[fit]*"], 0.2, "count/tools/*/calls"),
        ("count/tools/*/calls", "count/tools/*"),
        "More than 20 % of the tool calls fail, time out or have invalid arguments.",
        "Read transcripts; check the tool, its time limit, and the schema that the policy sees.",
        patience=5,
    ),
    Rule(
        "failed_conversations",
        above("stop/failed", 0.05),
        ("stop/failed",),
        "More than 5 % of the conversations failed through no fault of the policy, and abstain.",
        "Read the log: environment, tools, engine or reward raised.",
        patience=2,
    ),
)
